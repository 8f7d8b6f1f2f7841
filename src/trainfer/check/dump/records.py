"""What a dump holds, as records; one JSON object each (``docs/dump-format.md``).

Takes nothing, does nothing: plain Python, no torch, so that the aligner and the report can
use it. ``lines`` puts records into bytes, ``shard`` and ``writer`` put them on disk, ``reader``
gets them back.
"""

import enum
from collections.abc import Mapping

import msgspec

SCHEMA = "trainfer.dump/1"

MISSING = -1
"""A row's sequence, position and token where the slot holds no row (padding, warm-up, unknown)."""

NO_CALL = -1
"""The call number of records that belong to no forward call (weights, parameter gradients)."""

NO_TABLE = -1
"""The table number of tensors whose rows are not known."""

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The probabilities of ``Statistics.quantiles``, in order."""

SKETCH_WIDTH = 16
"""Projections per row in a sketch; the row's L2 norm follows as one more column."""

Number = float | str
"""A float; ``"nan"``, ``"inf"`` or ``"-inf"`` where JSON has no number."""


class Task(enum.Enum):
    """What is kept of a tensor."""

    TENSOR = "tensor"
    """All of it."""
    STATISTICS = "statistics"
    """A few numbers over all its elements."""
    SKETCH = "sketch"
    """A random projection of each row: float32 ``[rows, SKETCH_WIDTH + 1]``."""


class Role(enum.Enum):
    """Where a tensor stood."""

    INPUT = "input"
    OUTPUT = "output"
    INPUT_GRADIENT = "input_gradient"
    """Gradient of the loss with respect to an input."""
    OUTPUT_GRADIENT = "output_gradient"
    PARAMETER_GRADIENT = "parameter_gradient"
    """As accumulated when autograd was done with the parameter."""
    PARAMETER = "parameter"
    BUFFER = "buffer"


class RowLayout(enum.Enum):
    """How the rows of a forward call were told apart."""

    PADDED = "padded"
    """One sequence per batch entry, padding named by the attention mask."""
    PACKED = "packed"
    """Several sequences in one batch entry; positions restart."""
    CACHED = "cached"
    """Continues sequences of an earlier call through a key-value cache."""
    GIVEN = "given"
    """Named by ``Rows``."""
    UNKNOWN = "unknown"
    """Not readable from the call; the reason stands in the call record."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of all records: unknown fields are an error."""


class Blob(Record, frozen=True, kw_only=True):
    """Bytes in a shard."""

    shard: str
    """``step0/decode-0000.safetensors``, below the rank's folder."""
    offset: int
    """Of the first byte, from the start of the file."""
    nbytes: int
    checksum: str
    """See ``checksum.checksum``."""


class Statistics(Record, frozen=True, kw_only=True):
    """Numbers over all elements; min to norm and quantiles are over the finite ones.

    Example: [nan, 1, inf, -3] has count 4, nan 1, inf 1, zeros 0, min -3, max 1, mean -1, norm sqrt(10).
    """

    count: int
    nan: int
    inf: int
    zeros: int
    min: float | None
    """None where no element is finite."""
    max: float | None
    mean: float | None
    norm: float | None
    """L2."""
    quantiles: tuple[float, ...] | None
    """At ``QUANTILES``, of an evenly strided sample of at most ``quantile_sample`` elements."""
    quantile_sample: int


class TensorRecord(Record, frozen=True, kw_only=True, tag="tensor", tag_field="type"):
    """One tensor at one place of one forward call.

    Example: the query norm's output ``[2, 8, 5, 16]`` (batch, heads, tokens, head size) has
    ``row_dims=(0, 2)``: its ten rows are the slots of table ``table``, batch entry by batch entry.
    """

    id: int
    """0, 1, 2 ... in the order of execution, per rank."""
    task: Task
    step: int
    pass_name: str
    call: int
    """Forward call of the root module, counted from 0 per rank; ``NO_CALL`` for weights."""
    module: str
    """Transformers name; empty for the root."""
    occurrence: int
    """0 for the first time the module (or function) ran in its call, 1 for the second ..."""
    function: str | None
    """Null for modules; for level L1 the function, e.g. ``torch.nn.functional.silu``, and ``module`` the one it ran in."""
    role: Role
    name: str
    """``0`` or ``hidden_states`` or ``0.1`` (second of a tuple that is argument 0), or a parameter's local name."""
    dtype: str
    """Safetensors name: F32, BF16, I64, BOOL ..."""
    shape: tuple[int, ...]
    """Of the captured tensor. A sketch's blob is F32 ``[rows, SKETCH_WIDTH + 1]`` instead."""
    row_dims: tuple[int, ...]
    """Dimensions that run over the slots of ``table``, outermost first; empty where unknown."""
    table: int
    device: str
    requires_grad: bool
    parts: tuple[tuple[int, int, int], ...] = ()
    """For a distributed tensor: (dimension, this rank's part, number of parts) of each cut; ``shape`` is the part's."""
    blob: Blob | None = None
    """For tasks tensor and sketch. Records of one identical storage share it."""
    statistics: Statistics | None = None


class RowsRecord(Record, frozen=True, kw_only=True, tag="rows", tag_field="type"):
    """A table of slots: little-endian int32 ``[slots, 7]``: digest (4 words), sequence, position, token.

    ``MISSING`` in sequence and position marks a slot that is no row.
    """

    table: int
    """0, 1, 2 ... per rank."""
    call: int
    slots: int
    rows: int
    blob: Blob | None


class RowCounts(Record, frozen=True, kw_only=True):
    """Slots that were seen and given no key, and rows that were never computed."""

    padding: int = 0
    cached: int = 0
    """Rows of the prefix that a cache supplied and that no captured call computed."""
    discarded: int = 0
    """Tokens executed after the end of their sequence."""
    unknown: int = 0


class CallRecord(Record, frozen=True, kw_only=True, tag="call", tag_field="type"):
    """One forward call of the root module; written when the call ends."""

    call: int
    step: int
    pass_name: str
    weights_version: int
    layout: RowLayout
    slots: int
    table: int
    """Table of all slots, or ``NO_TABLE``."""
    counts: RowCounts
    training: bool
    grad: bool
    autocast: str | None
    note: str = ""
    """Why the layout is unknown."""


class ProblemRecord(Record, frozen=True, kw_only=True, tag="problem", tag_field="type"):
    """Something that could not be captured; the dump is marked incomplete."""

    message: str
    module: str = ""
    call: int = NO_CALL


class SequenceRecord(Record, frozen=True, kw_only=True, tag="sequence", tag_field="type"):
    """Prompt + response with the log-probs that a side computed for the response.

    Example: prompt [5, 6], response [7, 1]: ``tokens=(5, 6, 7, 1)``, ``prompt_length=2``, two log-probs.
    """

    index: int
    """0, 1, 2 ... in the order of recording, per rank."""
    tokens: tuple[int, ...]
    prompt_length: int
    logprobs: tuple[Number, ...]
    """Natural logarithms, one per response token."""
    sampling: Mapping[str, float | int]
    """temperature, top_k, top_p, min_p as applied to the log-probs."""
    weights_version: int
    step: int
    pass_name: str
    request_id: str | None = None


class WeightRecord(Record, frozen=True, kw_only=True, tag="weight", tag_field="type"):
    """One parameter or buffer by its fingerprint."""

    name: str
    module: str
    """The module that owns it."""
    role: Role
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    """See ``trainfer.exact.fingerprint``."""
    weights_version: int
    requires_grad: bool = False
    tied_to: str | None = None
    """An earlier name with the same storage."""
    parts: tuple[tuple[int, int, int], ...] = ()
    """As in ``TensorRecord``. ``shape`` is then the whole's; the fingerprints of the parts add up, in every
    16-digit word modulo 2**64, to that of the whole, and their element counts too."""
    blob: Blob | None = None
    """All of it, where full weights were asked for."""


IndexRecord = TensorRecord | RowsRecord | CallRecord | ProblemRecord


class ModuleEntry(Record, frozen=True, kw_only=True):
    """One module of the model as it stood when the capture began."""

    name: str
    kind: str
    """Class name."""
    training: bool
    attributes: Mapping[str, object]
    """Attributes that are not tensors but decide the maths: norm eps, rope scaling, window, soft-cap ..."""
    aliases: tuple[str, ...] = ()
    """Other names of the same module object."""


class Manifest(Record, frozen=True, kw_only=True):
    """What was captured, of what, with what."""

    schema: str
    side: str
    """``rollout`` or ``train``."""
    run_id: str
    launch_id: str
    """Equal on all ranks of one launch."""
    rank: int
    world_size: int
    ranks: tuple[int, ...] | None
    """The ranks that were asked to capture; null for all."""
    created: str
    """ISO 8601, UTC."""
    finished: str | None
    """Null while the capture is open, and for ever after a kill."""
    complete: bool
    incomplete_reasons: tuple[str, ...]
    capture: Mapping[str, object]
    """The arguments of ``capture``."""
    config: Mapping[str, object]
    """Effective configuration of the program that captured; empty where none was handed over."""
    model_class: str
    model_config: Mapping[str, object]
    model_dtype: str
    modules: tuple[ModuleEntry, ...]
    versions: Mapping[str, str]
    seed: int | None
    counts: Mapping[str, int]
    """calls, records, rows, padding, cached, discarded, unknown, bytes, deduplicated ..."""
