"""The ten experiments, those first that the most rests on. Their limits add up to eight minutes."""

from __future__ import annotations

from specrt.tools.gpu_check.experiment import Experiment
from specrt.tools.gpu_check.experiments.attention import check_attention
from specrt.tools.gpu_check.experiments.driver import check_driver
from specrt.tools.gpu_check.experiments.logits import check_logits, check_widths
from specrt.tools.gpu_check.experiments.rtx import check_rtx
from specrt.tools.gpu_check.experiments.samplers import check_samplers
from specrt.tools.gpu_check.experiments.speed import check_layers, check_round_graph
from specrt.tools.gpu_check.experiments.texts import check_memory, check_onnxruntime
from specrt.tools.gpu_check.kit import ATTENTION, LAYERS, ONNXRUNTIME, STANDARD

TOTAL_S = 480.0
_CUDA = {"cuda.bindings": "cuda-bindings"}
_RTX = {**_CUDA, "tensorrt_rtx": "tensorrt-rtx"}
_TEXT = {"tokenizers": "tokenizers", "jinja2": "jinja2"}
_PAIR = (STANDARD, ONNXRUNTIME)

EXPERIMENTS = (
    Experiment(
        "driver",
        "Do copies, page-locked memory, captures, events and threads behave as the runtime assumes?",
        *(20, _CUDA, (), check_driver),
    ),
    Experiment("rtx", "Does TensorRT-RTX load and run an engine here?", 30, _RTX, (STANDARD,), check_rtx),
    Experiment(
        "samplers",
        "Do all samplers, ties included, give what numpy gives?",
        *(70, _CUDA, _PAIR, check_samplers),
    ),
    Experiment(
        "logits",
        "Are logits those of the torch model in passes of any width, with the cache in place and prompts in chunks?",
        *(40, _CUDA, _PAIR, check_logits),
    ),
    Experiment(
        "onnxruntime",
        "Does ONNX Runtime's CUDA provider run the fp16 bundle without the CPU, with one wait a round?",
        *(45, {**_CUDA, **_TEXT, "onnxruntime": "onnxruntime-gpu"}, (ONNXRUNTIME,), check_onnxruntime),
    ),
    Experiment(
        "widths",
        "Does a row have the same bits in passes of 2 to W rows, with CUDA graphs and without?",
        *(35, _CUDA, _PAIR, check_widths),
    ),
    Experiment(
        "attention",
        "Which form of attention is the fastest at 2,048 and 8,192 slots, and does its time follow the live length?",
        *(95, _CUDA, (ATTENTION,), check_attention),
    ),
    Experiment(
        "layers",
        "How do the time of a pass, v(M), the host's share and launch gaps look on layers of a 1.5B model?",
        *(60, _CUDA, (LAYERS,), check_layers),
    ),
    Experiment(
        "round-graph",
        "Is a round captured as one CUDA graph faster than one graph a pass, and equal?",
        *(35, _CUDA, _PAIR, check_round_graph),
    ),
    Experiment(
        "memory",
        "Does memory stay constant with four threads and an adaptive K, how long is the longest stall, and does a "
        "second load reuse the first one's kernels?",
        *(50, {**_CUDA, **_TEXT}, _PAIR, check_memory),
    ),
)
