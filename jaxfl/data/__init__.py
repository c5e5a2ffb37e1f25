"""Examples, their partition, and the clients that hold them."""

from jaxfl.data.clients import describe, hold_out, leave_out, make_clients, shard
from jaxfl.data.corrupt import corrupt_clients, flip_labels, salt_and_pepper
from jaxfl.data.efficientnet import efficientnet_lite0
from jaxfl.data.encoder import Encoder
from jaxfl.data.features import features
from jaxfl.data.frame import ColumnEncoding, encode_frame, from_frame
from jaxfl.data.huggingface import from_huggingface
from jaxfl.data.leaf import from_leaf
from jaxfl.data.lists import from_lists
from jaxfl.data.load import NAMES, Dataset, from_arrays, load
from jaxfl.data.minilm import minilm, minilm_tokens
from jaxfl.data.owners import by_owner
from jaxfl.data.partition import (
    by_sizes,
    classes_per_client,
    dirichlet,
    dirichlet_by_client,
    iid,
    label_share,
    matching,
)

__all__ = [
    "NAMES",
    "ColumnEncoding",
    "Dataset",
    "Encoder",
    "by_owner",
    "by_sizes",
    "classes_per_client",
    "corrupt_clients",
    "describe",
    "dirichlet",
    "dirichlet_by_client",
    "efficientnet_lite0",
    "encode_frame",
    "features",
    "flip_labels",
    "from_arrays",
    "from_frame",
    "from_huggingface",
    "from_leaf",
    "from_lists",
    "hold_out",
    "iid",
    "label_share",
    "leave_out",
    "load",
    "make_clients",
    "matching",
    "minilm",
    "minilm_tokens",
    "salt_and_pepper",
    "shard",
]
