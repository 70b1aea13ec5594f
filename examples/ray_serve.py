"""A Ray Serve application of two engines: `serve run examples.ray_serve:app`.

`serve build examples.ray_serve:app -o serve.yaml` writes its configuration.
examples/deploy/ray/serve.yaml is a configuration that names the model. `qserve serve --backend ray`
needs neither.
"""

from pathlib import Path

from qserve.deploy.ray_app import build

MODEL = Path(__file__).resolve().parent / "models" / "docs-5m"

app = build(
    {
        "model": str(MODEL),
        "engine": {"device": "cpu", "max_num_seqs": 16},
        "server": {"served_model_name": ["docs-5m"]},
        "replicas": {"replicas": 2},
    }
)
