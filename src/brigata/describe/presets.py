"""Shapes of public models, by name. Source of each: the ``config.json`` that its authors publish."""

MODEL_PRESETS: dict[str, dict[str, object]] = {
    # HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": {
        "pattern": "*-" * 30,
        "hidden": 576,
        "heads": 9,
        "kv_heads": 3,
        "ffn": 1536,
        "vocab": 49152,
        "rope_theta": 100_000.0,
        "tie_embeddings": True,
    },
    # meta-llama/Llama-3.2-1B
    "llama3.2-1b": {
        "pattern": "*-" * 16,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "ffn": 8192,
        "vocab": 128_256,
        "rope_theta": 500_000.0,
        "tie_embeddings": True,
    },
    # meta-llama/Meta-Llama-3-8B
    "llama3-8b": {
        "pattern": "*-" * 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocab": 128_256,
        "rope_theta": 500_000.0,
    },
    # meta-llama/Meta-Llama-3-70B
    "llama3-70b": {
        "pattern": "*-" * 80,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28672,
        "vocab": 128_256,
        "rope_theta": 500_000.0,
    },
}
