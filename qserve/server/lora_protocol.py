"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter. Names follow vLLM's."""

from typing import Annotated

from pydantic import Field

from qserve.lora.request import MAX_NAME
from qserve.server.protocol import Body

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class LoadAdapterRequest(Body):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Name  # of a folder in --lora-folder
    load_inplace: bool | None = None  # in place of one of this name


class UnloadAdapterRequest(Body):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None  # changes nothing: names are enough
