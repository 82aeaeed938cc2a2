"""What a framework fixes by default, for rows that do not say it. Each rule names its ground.

Nothing else is filled: a row that lacks what no rule gives is refused with the reason.
"""

import re

from brigata.validate.tables import RefusedRowError, Row

SOFTWARE = (
    (r"zero-bubble", "megatron-2021"),
    (r"mindspeed", "megatron-2024"),
    (r"paxml", "paxml-2023"),
    (r"maxtext|pathways|jax|t5x", "xla-2024"),
    (r"zero-3|zero-infinity", "deepspeed-2021"),
    (r"fsdp|foundry|torchtitan|sagemaker|colossal|nanotron|lightning", "pytorch-2023"),
    (r"megatron-core dev", "megatron-2025"),
    (r"primus|nemo|megatron-core|megatron bridge|mcore|megascale|dualpipe", "megatron-core"),
    (r"deepspeed", "deepspeed-2022"),
    (r"megatron|neox|oneflow|meta internal", "megatron-2021"),
)
"""Words of ``framework`` -> generation; the first that matches. ``megatron-core`` is told apart by date."""
OMNI_PATH = 0.2
"""Share of its nominal rate that Omni-Path reached on Jean Zay (measured: stas00/ml-engineering, network)."""
GENERATIONS = (((26, 5), "megatron-2026"), ((25, 6), "megatron-2025"))
"""NeMo's year and month -> generation: from 25.07 the performance recipes capture CUDA graphs and fuse the
experts' permutation; from 26.06 they overlap more of it (release notes of NeMo and Megatron Bridge)."""
PRESETS = {
    "deepseekv3": "deepseek-v3",
    "deepseekv2": "deepseek-v2",
    "qwen330ba3b": "qwen3-30b-a3b",
    "qwen3235ba22b": "qwen3-235b-a22b",
    "nemotron3nano": "nemotron3-nano-30b-a3b",
    "nemotronh8b": "nemotron-h-8b",
    "nemotronh56b": "nemotron-h-56b",
    "gptoss120b": "gpt-oss-120b",
    "gptoss20b": "gpt-oss-20b",
    "kimik2": "kimi-k2",
    "mixtral8x7b": "mixtral-8x7b",
    "mixtral8x22b": "mixtral-8x22b",
    "grok1314b": "grok-1",
    "llama4maverick400b": "llama4-maverick",
    "llama4scout109b": "llama4-scout",
}
"""Names of models whose shape does not fit into a table's columns -> their preset."""
PLAIN_WORDS = (
    "gpt",
    "mlm",
    "zb-",
    "mpt",
    "pythia",
    "nemotron",
    "bloom",
    "mt-nlg",
    "opt",
    "mcore",
    "ds-azure",
)
"""Models without a gate in their feed-forwards: GPT-2's shape, and Nemotron's squared ReLU."""
VOCABULARY = {
    "gpt": 51200,
    "mlm": 51200,
    "zb-": 51200,
    "ds-azure": 51200,
    "mcore": 131072,
    "llama": 32000,
    "baichuan-": 64000,
    "baichuan2": 125696,
    "bloom": 250880,
    "intern": 103168,
    "qwen": 151936,
    "aquila": 100008,
    "mixtral": 32000,
}
"""Words of a model's name -> vocabulary, padded as its framework does (Megatron: 50,257 -> 51,200)."""


def software_of(row: Row) -> str:
    """The generation of a row's framework."""
    framework = row.text("framework").lower()
    for pattern, name in SOFTWARE:
        if re.search(pattern, framework):
            if name == "megatron-core":
                return _dated(row)
            if name == "deepspeed-2022" and zero_of(row) == 3:
                return "deepspeed-2021"
            return name
    raise RefusedRowError(f"framework = {row.text('framework')!r} is not known")


def _dated(row: Row) -> str:
    found = re.search(r"nemo (\d{2})\.(\d{2})", row.text("stack_date").lower())
    if found:
        for since, name in GENERATIONS:
            if (int(found[1]), int(found[2])) >= since:
                return name
    return "megatron-2024"


def preset_of(row: Row) -> str | None:
    """The preset of a row's model, if its shape needs one."""
    return PRESETS.get(re.sub(r"[^a-z0-9]", "", row.text("model").lower()))


def is_plain(row: Row) -> bool:
    """Whether feed-forwards have no gate: GPT-2's descendants, whose width is 4 times hidden."""
    ffn, hidden = row.number("ffn"), row.need("hidden")
    named = any(word in row.text("model").lower() for word in PLAIN_WORDS)
    return (ffn is None and named) or (ffn is not None and ffn == 4 * hidden)


def vocabulary_of(row: Row) -> int:
    """The vocabulary, from the model's family where none is printed; under tp padded as Megatron does."""
    printed, tp = row.number("vocab"), row.count("tp")
    if printed is not None:
        return int(printed) if tp == 1 else -(-int(printed) // (128 * tp)) * 128 * tp
    name = row.text("model").lower()
    for word, size in VOCABULARY.items():
        if word in name:
            return size
    raise RefusedRowError("vocab is missing")


def recompute_of(row: Row, software: str) -> tuple[str, int | None]:
    """What is computed again, and in how many layers of a rank.

    Where nothing is said: nothing in Megatron-Core and NeMo (their recipes' default), as in the zero-bubble
    paper's runs; whole layers in Megatron before selective recomputation (arXiv 2205.05198), which could not
    have fitted otherwise.
    """
    said = row.text("recompute").lower()
    if not said:
        old = software in ("megatron-2021", "deepspeed-2022") and "zero-bubble" not in row.text("framework")
        return ("full" if old else "none"), None
    layers = re.search(r"block, (\d+) layers", said)
    if layers:
        return "full", int(layers[1])
    if said.startswith(("full", "yes")):
        return "full", None
    if said.startswith(("none", "no ")):
        return "none", None
    return "selective", None


def recompute_is_open(row: Row, software: str) -> bool:
    """Whether a row leaves open how much is computed again: then it is the least that fits, since it ran.

    NeMo and PAXML do not publish it; FSDP's "selective" checkpoints every so many layers.
    """
    said = row.text("recompute").lower()
    if software.startswith("xla"):
        return False
    return not said or (software.startswith("pytorch") and said.startswith("selective"))


def zero_of(row: Row) -> int:
    """The ZeRO stage; where nothing is said 0, in Megatron-Core 1 (the distributed optimizer)."""
    said = row.text("sharding").lower()
    found = re.search(r"zero-?(\d)", said)
    if found:
        return int(found[1])
    if not said and re.search(r"megatron-core|nemo|primus", row.text("framework").lower()):
        return 1
    return 3 if "fsdp" in said or "hsdp" in said else 0


def precision_of(row: Row) -> str:
    """The products' precision; 16 bits where nothing is said."""
    said = row.text("precision").lower()
    for word, precision in (
        ("fp4", "fp4"),
        ("fp8", "fp8"),
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("fp32", "fp32"),
    ):
        if word in said:
            return precision
    return "bf16"


def schedule_of(row: Row, stages: int) -> tuple[str, int]:
    """The pipeline's order, and stages a rank."""
    said = row.text("pp_schedule").lower()
    for word, order in (
        ("zb-1p", "zb-h1"),
        ("zb-h1", "zb-h1"),
        ("zb-2p", "zb-h2"),
        ("zb-h2", "zb-h2"),
        ("zbv", "zb-v"),
        ("zb-v", "zb-v"),
        ("dualpipev", "dualpipe-v"),
        ("gpipe", "gpipe"),
    ):
        if word in said:
            return order, 1
    if "dualpipe" in said:
        raise RefusedRowError(f"pp_schedule = {row.text('pp_schedule')!r} is not modelled")
    return ("interleaved", stages) if stages > 1 else ("1f1b", 1)


def network_of(row: Row) -> float | None:
    """GB/s a device between nodes, where ``interconnect`` says N x R Gb/s per node, or R Gb/s per node."""
    said, devices = row.text("interconnect"), row.count("gpus_per_node", 8)
    if (
        "Omni-Path" in said
    ):  # Jean Zay: all-reduces of 32 and 16 devices measured at a fifth of the adapters' rate
        return 50 * OMNI_PATH / devices
    found = re.search(r"(\d+)\s*x\s*(\d+)\s*Gb/s", said)
    if found:
        return int(found[1]) * int(found[2]) / 8 / devices
    found = re.search(r"(\d+)\s*x\s*(?:HDR|NDR|EDR)?\s*(\d+)\s*Gb/s", said)
    if found:
        return int(found[1]) * int(found[2]) / 8 / devices
    found = re.search(r"(\d+)\s*Gb/s[^;]*per node", said)
    return int(found[1]) / 8 / devices if found else None


def sequence_parallel_of(row: Row, software: str, tp: int) -> bool:
    """Said, or with tp; in older Megatron with selective recomputation only (arXiv 2205.05198)."""
    said = row.text("seq_parallel").lower()
    if said:
        return said.startswith(("yes", "1", "true", "on"))
    if software in ("megatron-2021", "deepspeed-2022"):
        return row.text("recompute").lower().startswith("selective")
    return tp > 1
