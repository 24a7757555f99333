"""How fast the devices that Megatron runs on compute, move memory and start kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_balance.errors import BalanceError


@dataclass(frozen=True)
class Kernel:
    """One operation on a device.

    Attributes:
        bytes_moved: read from and written to memory.
        flops: floating-point operations of matrix products; 0 for work that memory bounds.
        dtype: of those products: ``fp32``, ``bf16``, ``fp16``, ``fp8`` or ``fp4``.
    """

    bytes_moved: float
    flops: float = 0.0
    dtype: str = "fp32"


@dataclass(frozen=True)
class Link:
    """The way from a device to one of another pipeline stage.

    Attributes:
        latency_s: of an empty message, from the end of the kernel that made it to the start of the one that waits for it.
        bytes_per_s: bandwidth in one direction.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, bytes_sent: float) -> float:
        return self.latency_s + bytes_sent / self.bytes_per_s


# Pipeline stages usually stand on different nodes, so that a link is one port of the network for each GPU, as in NVIDIA's
# reference systems: 200 Gb/s InfiniBand HDR with an A100, 400 Gb/s NDR since. Within a node NVLink is 6 to 18 times as
# fast. Latencies are a rule of thumb, not measured here: a few microseconds of network and NCCL's kernels at both ends.
_HDR = Link(10e-6, 25e9)
_NDR = Link(10e-6, 50e9)
# Processes on one machine share its memory: a message is a copy, which costs their cores time and is part of no cost yet.
NO_LINK = Link(0.0, math.inf)


@dataclass(frozen=True)
class Device:
    """What a device achieves in training, which is less than its data sheet says.

    Attributes:
        name: shown to the user.
        matmul_flops_per_s: rate of large matrix products, by dtype.
        bytes_per_s: bandwidth of operations on tensors that do not fit the caches.
        kernel_s: what every operation costs however small it is: its launch and the framework around it.
        memory_bytes: of the device; None where it is shared with others (CPU).
        link: to the device of the next pipeline stage.
    """

    name: str
    matmul_flops_per_s: Mapping[str, float]
    bytes_per_s: float
    kernel_s: float
    memory_bytes: float | None = None
    link: Link = NO_LINK

    @property
    def reserve_bytes(self) -> float:
        """Memory that a plan leaves free: a tenth, and 2 GB.

        A rule of thumb. A CUDA context with its libraries takes about 0.5 to 1 GB, buffers and workspaces of NCCL, cuBLAS
        and Transformer Engine 1 to 2 GB more; the allocator loses some to fragments, and estimates are estimates.
        """
        return 0.0 if self.memory_bytes is None else 0.1 * self.memory_bytes + 2e9

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        """Time of ``kernels`` one after the other, each bound by arithmetic or by memory (a roofline).

        Raises:
            BalanceError: the device has no rate for a kernel's dtype.
        """
        return sum(self._arithmetic_or_memory_s(kernel) + self.kernel_s for kernel in kernels)

    def _arithmetic_or_memory_s(self, kernel: Kernel) -> float:
        memory_s = kernel.bytes_moved / self.bytes_per_s
        return max(memory_s, kernel.flops / self._rate(kernel.dtype)) if kernel.flops else memory_s

    def _rate(self, dtype: str) -> float:
        if dtype not in self.matmul_flops_per_s:
            known = ", ".join(self.matmul_flops_per_s)
            raise BalanceError(f"{self.name} has no {dtype} matrix products, only {known}: choose another precision")
        return self.matmul_flops_per_s[dtype]


# Share of the data sheet that large operations reach. Rules of thumb, not measured here: cuBLAS and FlashAttention-3
# (arXiv 2407.08608) report 60 to 75 % of an H100's peak in bf16, STREAM-like copies 85 to 92 % of its bandwidth. Only
# the ratio of the two moves a split, and only as far as memory-bound work weighs.
_PEAK_SHARE = 0.7
_BANDWIDTH_SHARE = 0.85
_GPU_KERNEL_S = 5e-6


def _gpu(name: str, gigabytes: float, terabytes_per_s: float, link: Link = _NDR, **teraflops: float) -> Device:
    """A GPU from its data sheet: memory, its bandwidth and peak of dense (not sparse) matrix products."""
    rates = {dtype: _PEAK_SHARE * peak * 1e12 for dtype, peak in teraflops.items()}
    return Device(name, rates, _BANDWIDTH_SHARE * terabytes_per_s * 1e12, _GPU_KERNEL_S, gigabytes * 1e9, link)


# NVIDIA's data sheets of the SXM modules. fp32 without TF32, which torch leaves off by default.
_A100 = _gpu("A100", 80, 2.04, _HDR, fp32=19.5, bf16=312, fp16=312)
_H100 = _gpu("H100", 80, 3.35, fp32=67, bf16=989, fp16=989, fp8=1979)
_H200 = _gpu("H200", 141, 4.8, fp32=67, bf16=989, fp16=989, fp8=1979)
_B200 = _gpu("B200", 180, 7.7, fp32=75, bf16=2250, fp16=2250, fp8=4500, fp4=9000)
# Arithmetic and bandwidth in the proportion of the last three generations (about 270 flops a byte in bf16).
_GENERIC_GPU = _gpu("generic GPU", 80, 3.0, fp32=50, bf16=800, fp16=800, fp8=1600, fp4=3200)

# Measured on one core of a virtual EPYC server: products of 128 to 512 rows; passes over tensors of tens of MB, page
# faults of fresh memory included, which make them several times slower (tables under 32 MB, which malloc reuses, are
# therefore overrated); a layer of almost no size over its operations. bf16 and fp16 are taken to be as fast as fp32.
# Measured before the CPU runtime kept freed memory (`cpu/`), which spares those page faults: bytes are rated too slow now.
CPU_CORE = Device("CPU core", {"fp32": 75e9, "bf16": 75e9, "fp16": 75e9}, 6e9, 70e-6)

# Chips by the word that stands in torch.cuda.get_device_name(): whole words, so that an H20 is not taken for an H200.
# A800 and H800 are the same chips with slower links, GH200 and GB200 carry an H100 and a B200.
_BY_WORD = {
    "A100": _A100,
    "A800": _A100,
    "H100": _H100,
    "H800": _H100,
    "GH200": _H100,
    "H200": _H200,
    "B200": _B200,
    "GB200": _B200,
    "CPU": CPU_CORE,
}


def device_chosen(name: str) -> Device:
    """The device that a user calls ``name``: a chip of the table, ``generic`` or ``cpu``, perhaps with speeds of its own.

    ``H100,tflops=700,tbps=3`` is an H100 whose large matrix products reach 700 TFLOP/s in bf16, those of other dtypes in
    proportion, and whose memory moves 3 TB/s.

    Raises:
        BalanceError: there is no such device, the message lists those that there are; or a speed is none.
    """
    chip, *speeds = name.split(",")
    device = _of_table(chip)
    for speed in speeds:
        device = _with_speed(device, *speed.partition("=")[::2])
    return device


def _with_speed(device: Device, unit: str, value: str) -> Device:
    try:
        speed = float(value)
    except ValueError:
        speed = 0.0
    if unit not in ("tflops", "tbps") or not 0 < speed < 1e6:
        raise BalanceError(f"{unit}={value} is no speed of a device: write tflops=NUMBER or tbps=NUMBER, above 0")
    if unit == "tbps":
        return replace(device, name=f"{device.name}, {value} TB/s", bytes_per_s=speed * 1e12)
    factor = speed * 1e12 / device.matmul_flops_per_s["bf16"]
    rates = {dtype: rate * factor for dtype, rate in device.matmul_flops_per_s.items()}
    return replace(device, name=f"{device.name}, {value} TFLOP/s", matmul_flops_per_s=rates)


def _of_table(name: str) -> Device:
    if name.upper() == "GENERIC":
        return _GENERIC_GPU
    if name.upper() not in _BY_WORD:
        known = ", ".join(word.lower() if word == "CPU" else word for word in _BY_WORD)
        raise BalanceError(f"no speeds are known of device {name}: choose one of {known} or generic")
    return _BY_WORD[name.upper()]


def device_named(name: str) -> Device:
    """The device that ``torch.cuda.get_device_name()`` calls ``name``, or a CPU core for ``cpu``.

    A name that is not in the table is taken for a GPU of ordinary proportions. One that tells a smaller memory than the
    table's is believed (``A100-PCIE-40GB``).
    """
    words = re.findall(r"[A-Z]+\d*", name.upper())
    device = next((_BY_WORD[word] for word in words if word in _BY_WORD), _GENERIC_GPU)
    told = re.search(r"\b(\d+) ?GB\b", name.upper())
    if told is None or device.memory_bytes is None:
        return device
    return replace(device, memory_bytes=min(device.memory_bytes, float(told[1]) * 1e9))
