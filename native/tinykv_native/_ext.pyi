import mlx.core as mx

built_for: str

def running_with() -> str: ...
def size(array: mx.array) -> int: ...
def attend(
    queries: mx.array,
    key_pages: mx.array,
    value_pages: mx.array,
    block_table: mx.array,
    context_lens: mx.array,
    query_lens: mx.array,
    *,
    scale: float,
    causal: bool = False,
    window: int = 0,
    keep: int = 0,
    softcap: float = 0.0,
    keys: tuple[int, int, int, mx.Dtype] | None = None,
    values: tuple[int, int, int, mx.Dtype] | None = None,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    written: mx.array | None = None,
    last_read: mx.array | None = None,
) -> tuple[mx.array, mx.array]: ...
def write_pages(
    key_pages: mx.array,
    value_pages: mx.array,
    slot_mapping: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    written: mx.array | None = None,
    last_read: mx.array | None = None,
) -> mx.array: ...
def copy_pages(
    key_pages: mx.array,
    value_pages: mx.array,
    sources: list[int],
    targets: list[int],
    *,
    written: mx.array | None = None,
    last_read: mx.array | None = None,
) -> mx.array: ...
def resize_pages(pool: mx.array | None, shape: list[int], dtype: mx.Dtype, reserve: int = 0) -> mx.array: ...
def fits(pool: mx.array, num_pages: int) -> bool: ...
def pool_bytes() -> tuple[int, int, int]: ...
def data_pointer(array: mx.array) -> int: ...
def set_threads(threads: int) -> None: ...
def threads() -> int: ...
def isas() -> list[str]: ...
def isa() -> str: ...
def choose_isa(name: str) -> None: ...
