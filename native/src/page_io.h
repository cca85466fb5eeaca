#pragma once
// Writing into pages, in place: new tokens, and whole pages copied.
#include <cstdint>
#include <vector>

#include "kernel_table.h"

namespace tinykv {

// One of a layer's two page arrays, (num_pages, kv_heads, page_size, dim), contiguous.
struct PageArray {
  char* data = nullptr;
  int num_pages = 0;
  int kv_heads = 0;
  int page_size = 0;
  int dim = 0;
  int item_bytes = 0;

  size_t token_bytes() const { return size_t(dim) * item_bytes; }
  size_t page_bytes() const { return token_bytes() * page_size * kv_heads; }
};

// New tokens (batch, kv_heads, tokens, dim) at strides in elements, of the pages' dtype.
struct Tokens {
  const char* data = nullptr;
  int batch = 0;
  int tokens = 0;
  int64_t strides[4] = {};
};

// Throws std::out_of_range, with the numbers, if a slot is neither -1 nor in the pages.
void check_slots(const PageArray& pages, const int32_t* slots, int batch, int tokens);

// Copies every token with a slot other than -1 to its slot; slots (batch, tokens) must have passed check_slots().
void write_tokens(const PageArray& pages, const Tokens& tokens, const int32_t* slots);

// Throws std::out_of_range if a page id isn't in the pages.
void check_pages(const PageArray& pages, const std::vector<int>& page_ids);

// Copies page sources[i] to targets[i], in order.
void copy_pages(const PageArray& pages, const std::vector<int>& sources, const std::vector<int>& targets);

}  // namespace tinykv
