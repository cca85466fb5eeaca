// Copies what each row's queries may see together: its kept tokens, then its newest ones, then zeros.
//
// Ordered by tokens as write.metal is; mlx's own operations can't be, as they take no token.
//
// grid: (the larger head dim, columns, rows x kv heads) threads.

const int dim = thread_position_in_grid.x;
const int column = thread_position_in_grid.y;
const int kv_heads = key_pages_shape[1];
const int row = thread_position_in_grid.z / kv_heads;
const int kv_head = thread_position_in_grid.z % kv_heads;
const int kept = rows[4 * row];        // columns of the first tokens
const int newest = rows[4 * row + 1];  // position of the column after them
const int length = rows[4 * row + 2];  // columns that hold a token
const int start = rows[4 * row + 3];   // of its page ids
const int64_t to = int64_t(thread_position_in_grid.z) * threads_per_grid.y + column;

int page = 0;
int slot = 0;
if (column < length) {
  const int position = column < kept ? column : column - kept + newest;
  page = page_ids[start + position / PAGE];
  slot = position % PAGE;
}
if (dim < K_DIM) {
  const int64_t from = token_offset(page, kv_head, slot, kv_heads, PAGE, K_DIM);
  keys[to * K_DIM + dim] = column < length ? key_pages[from + dim] : K(0);
}
if (dim < V_DIM) {
  const int64_t from = token_offset(page, kv_head, slot, kv_heads, PAGE, V_DIM);
  values[to * V_DIM + dim] = column < length ? value_pages[from + dim] : V(0);
}
if (dim == 0 && column == 0 && thread_position_in_grid.z == 0) {
  token[0] = 0;
  if (V_DIM == 0) {
    values[0] = V(0);  // an output has an element at least
  }
}
