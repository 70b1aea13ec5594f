"""Mixer of the row of PLaMo 2 in families.py: Mamba-2 whose dt, B and C are computed as in Mamba-1.

After the convolution one matrix computes B, C and the inputs of another matrix, which computes dt.
"""

from formats.architecture.projection import Projection
from formats.architecture.states.mixer import StateMixer, StateTensor

_MODULE = "mixer"
_HEADS = (("mamba_n_heads",),)
PLAMO_MAMBA = StateMixer(
    kind="Mamba-2",
    module=_MODULE,
    inputs=Projection(
        name=f"{_MODULE}.in_proj",
        members=((f"{_MODULE}.in_proj", "mamba_gated"),),
        inputs="hidden_size",
    ),
    grouped=True,  # z of a head, then its x
    selection=(
        Projection(
            name=f"{_MODULE}.bcdt_proj",
            members=((f"{_MODULE}.bcdt_proj", "mamba_selection"),),
            inputs="mamba_inner",
            split="inputs",
            float_because="few outputs, which control what each token writes and forgets",
        ),
        Projection(
            name=f"{_MODULE}.dt_proj",
            members=((f"{_MODULE}.dt_proj", "mamba_n_heads"),),
            inputs="mamba_dt_rank",
            float_because="few outputs, which control what each token forgets",
        ),
    ),
    out=Projection(
        name=f"{_MODULE}.out_proj",
        members=((f"{_MODULE}.out_proj", "hidden_size"),),
        inputs="mamba_inner",
        split="inputs",
    ),
    others=(
        StateTensor(
            key="conv_weight",
            name="conv1d.weight",
            shape=(("mamba_inner",), ("one",), ("mamba_d_conv",)),
        ),
        StateTensor(key="a_log", name="A_log", shape=_HEADS, float32=True),
        StateTensor(key="skip", name="D", shape=_HEADS, float32=True),
        StateTensor(key="dt_bias", name="dt_bias", shape=_HEADS, float32=True),
        *(
            StateTensor(
                key=f"{name.lower()}_norm",
                name=f"{name}_norm_weight",
                shape=((size,),),
                of_heads=False,
            )
            for name, size in (
                ("dt", "mamba_dt_rank"),
                ("B", "mamba_d_state"),
                ("C", "mamba_d_state"),
            )
        ),
    ),
)
