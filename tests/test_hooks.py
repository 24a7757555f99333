"""The registry, and what `enable` touches of the real Megatron."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.registry import Hook, Registry


@pytest.fixture
def modules(monkeypatch):
    """A module that defines a function and another that imported it by name."""
    defining, importing = types.ModuleType("megatron.defining"), types.ModuleType("megatron.importing")
    defining.__file__ = "/checkout/megatron/defining.py"
    defining.answer = importing.renamed = lambda: 1
    importing.other = lambda: 1
    for module in (defining, importing):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return defining, importing


def doubling_hook(attribute="answer"):
    return Hook("megatron.defining", attribute, "--flag", "doubles", lambda original: lambda: 2 * original())


def test_hook_replaces_every_name_of_its_function_and_undoes_it(modules):
    defining, importing = modules
    original, other = defining.answer, importing.other
    registry, hook = Registry(), doubling_hook()
    registry.apply(hook)
    assert (defining.answer(), importing.renamed(), importing.other()) == (2, 2, 1)
    registry.undo(hook)
    assert defining.answer is importing.renamed is original and importing.other is other


def test_hook_is_applied_once(modules):
    registry = Registry()
    hook = doubling_hook()
    registry.apply(hook)
    registry.apply(hook)
    assert modules[0].answer() == 2


def test_hook_is_undone_where_it_was_imported_later(modules):
    defining, importing = modules
    original, registry, hook = defining.answer, Registry(), doubling_hook()
    registry.apply(hook)
    importing.later = defining.answer
    registry.undo(hook)
    assert importing.later is original


def test_hooks_of_one_function_nest(modules):
    adding = Hook("megatron.defining", "answer", "--other", "adds", lambda original: lambda: original() + 1)
    registry = Registry()
    registry.apply(doubling := doubling_hook())
    registry.apply(adding)
    assert modules[1].renamed() == 3
    registry.undo(adding)
    registry.undo(doubling)
    assert modules[1].renamed() == 1


def test_method_is_replaced_in_its_class_and_put_back(modules):
    class Answers:
        def answer(self):
            return 1

    modules[0].Answers, original = Answers, Answers.answer
    hook = Hook("megatron.defining", "Answers.answer", "--flag", "", lambda method: lambda self: 2 * method(self))
    registry = Registry()
    registry.apply(hook)
    assert Answers().answer() == 2
    registry.undo(hook)
    assert Answers.answer is original
    with pytest.raises(BalanceError, match=r"--flag needs megatron\.defining\.Answers\.reply"):
        registry.apply(Hook("megatron.defining", "Answers.reply", "--flag", "", lambda method: method))


def test_missing_target_names_flag_and_full_path(modules):
    with pytest.raises(BalanceError, match=r"--flag needs megatron\.defining\.answr.*doctor"):
        Registry().apply(doubling_hook("answr"))
    with pytest.raises(BalanceError, match=r"--flag needs megatron\.nowhere\.answer, but .* cannot be imported"):
        Registry().apply(Hook("megatron.nowhere", "answer", "--flag", "", lambda original: original))


UNTOUCHED = """
import importlib, sys
import megatron.training.training, megatron.training.yaml_arguments
for name in ("checkpointing", "initialize", "global_vars", "arguments", "training", "utils"):
    importlib.import_module(f"megatron.training.{name}")
modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
before = {(place, name): value for place, module in modules.items() for name, value in vars(module).items()}
import megatron_balance
sys.argv = ["pretrain_gpt.py", "--num-layers", "2"]
megatron_balance.enable()
megatron_balance.enable()
changed = {key for key, value in before.items() if vars(sys.modules[key[0]]).get(key[1]) is not value}
print(sorted({name for _, name in changed}), len(before) > 10_000)
assert all(vars(sys.modules[module])[name].__wrapped__ is before[module, name] for module, name in changed)
"""


@pytest.mark.training
def test_without_a_flag_only_the_four_entry_points_differ():
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['add_megatron_arguments', 'pretrain', 'set_global_variables', 'validate_args'] True\n"
