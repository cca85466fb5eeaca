// Puts new tokens, K and V of a layer, into their slots.
//
// written in place: key_pages, value_pages
//
// mlx knows nothing of these writes. Later kernels that touch the pages take `token` as an input, and this one takes
// the `written` and `last_read` of earlier ones: mlx makes a kernel wait for those that wrote its inputs.
//
// grid: (the larger head dim, new tokens of all rows, kv heads) threads.

const int dim = thread_position_in_grid.x;
const int kv_head = thread_position_in_grid.z;
const int kv_heads = key_pages_shape[1];
const int page_size = key_pages_shape[2];
const int key_dim = key_pages_shape[3];
const int value_dim = VALUES ? value_pages_shape[3] : 0;
const int row = thread_position_in_grid.y / slot_mapping_shape[1];
const int column = thread_position_in_grid.y % slot_mapping_shape[1];
const int slot = slot_mapping[thread_position_in_grid.y];

if (slot >= 0 && dim < key_dim) {
  const int64_t to = token_offset(slot / page_size, kv_head, slot % page_size, kv_heads, page_size, key_dim);
  writable(key_pages)[to + dim] =
      keys[row * keys_strides[0] + kv_head * keys_strides[1] + column * keys_strides[2] + dim * keys_strides[3]];
}
if (slot >= 0 && dim < value_dim) {
  const int64_t to = token_offset(slot / page_size, kv_head, slot % page_size, kv_heads, page_size, value_dim);
  writable(value_pages)[to + dim] = values
      [row * values_strides[0] + kv_head * values_strides[1] + column * values_strides[2] + dim * values_strides[3]];
}
if (dim == 0 && kv_head == 0 && thread_position_in_grid.y == 0) {
  token[0] = 0;
}
