"""`torchrun` that ends with the process that started it, even where that is killed and can stop nothing itself."""

from megatron_balance.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main()
