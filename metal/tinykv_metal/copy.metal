// Copies whole pages, K and V of a layer, for copy-on-write. No page may be a source and a target in one call.
//
// written in place: key_pages, value_pages
//
// Ordered by tokens as write.metal is.
//
// grid: (elements of the larger page, copies) threads.

const int64_t element = thread_position_in_grid.x;
const int64_t source = moves[2 * thread_position_in_grid.y];
const int64_t target = moves[2 * thread_position_in_grid.y + 1];
const int64_t page_tokens = int64_t(key_pages_shape[1]) * key_pages_shape[2];
const int64_t key_size = page_tokens * key_pages_shape[3];
const int64_t value_size = VALUES ? page_tokens * value_pages_shape[3] : 0;

if (element < key_size) {
  writable(key_pages)[target * key_size + element] = key_pages[source * key_size + element];
}
if (element < value_size) {
  writable(value_pages)[target * value_size + element] = value_pages[source * value_size + element];
}
if (element == 0 && thread_position_in_grid.y == 0) {
  token[0] = 0;
}
