"""The commented job that ``brigata init`` writes, and the schema by which editors complete it."""

import json

from brigata.describe.job import Job

JOB_TEMPLATE = """\
#:schema ./{schema}
version = 1
name = "{name}"

[model]                       # preset = "qwen3-0.6b" takes a public model's shape (`brigata models`) instead,
                              # path = "folder" a checkpoint's shape and weights
hidden = 256                  # width of the residual stream
pattern = "(*-)4"             # residual units: * attention, w in a window, - MLP, M Mamba-2, E experts
heads = 8                     # query heads; kv_heads (grouped-query), head_dim, ffn have defaults
kv_heads = 4

[cluster]
preset = "local"              # this machine; devices = N fixes the number of ranks

[workload]
seq_len = 256                 # tokens
global_batch = 16             # sequences a step, over all ranks
# micro_batch = 8             # sequences a forward pass; smaller ones accumulate gradients

[layout]                      # ranks = tp * dp
tp = 2                        # tensor parallelism: weights and residual stream cut over 2 ranks
dp = 1                        # data parallelism; zero = 2 or 3 says what its ranks share out
overlap = "direct"            # or "ring", "sliced:4", "blocking_p2p", "blocking"

[train]
steps = 300
lr = 3e-3
warmup = 20
precision = "fp32"            # or "bf16" (fp32 master parameters), "fp64"
# data = "folder"             # text files; default: the Python standard library's sources
"""


def job_template(name: str, schema: str) -> str:
    """A commented job called ``name`` that points editors at the file ``schema`` beside it."""
    return JOB_TEMPLATE.format(name=name, schema=schema)


def job_schema() -> str:
    """JSON Schema of a job file, indented."""
    return json.dumps(Job.model_json_schema(), indent=2) + "\n"
