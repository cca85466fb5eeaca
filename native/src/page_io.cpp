#include "page_io.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "thread_pool.h"

namespace tinykv {
namespace {

// Copying less than this is done before another thread has woken up.
constexpr size_t kAloneBytes = 256 << 10;

void write_token(const PageArray& pages, const Tokens& tokens, int row, int token, int slot) {
  const size_t bytes = pages.token_bytes(), item = pages.item_bytes;
  const int page = slot / pages.page_size, offset = slot % pages.page_size;
  const int64_t* strides = tokens.strides;
  const char* from = tokens.data + (row * strides[0] + token * strides[2]) * int64_t(item);
  char* to = pages.data + page * pages.page_bytes() + offset * bytes;
  for (int head = 0; head < pages.kv_heads; ++head) {
    if (strides[3] == 1) std::memcpy(to, from, bytes);
    else for (int d = 0; d < pages.dim; ++d) std::memcpy(to + d * item, from + d * strides[3] * int64_t(item), item);
    from += strides[1] * int64_t(item);
    to += bytes * pages.page_size;
  }
}

}  // namespace

void check_slots(const PageArray& pages, const int32_t* slots, int batch, int tokens) {
  const int64_t room = int64_t(pages.num_pages) * pages.page_size;
  for (int64_t i = 0; i < int64_t(batch) * tokens; ++i) {
    if (slots[i] >= -1 && slots[i] < room) continue;
    std::ostringstream text;
    text << "write_pages: slot_mapping[" << i / tokens << "][" << i % tokens << "] is " << slots[i] << ", but "
         << pages.num_pages << " pages of " << pages.page_size << " tokens have slots 0 to " << room - 1
         << ", and -1 skips a token";
    throw std::out_of_range(text.str());
  }
}

void write_tokens(const PageArray& pages, const Tokens& tokens, const int32_t* slots) {
  const int count = tokens.batch * tokens.tokens;
  auto write = [&](int i) {
    if (slots[i] >= 0) write_token(pages, tokens, i / tokens.tokens, i % tokens.tokens, slots[i]);
  };
  if (count * pages.token_bytes() * pages.kv_heads < kAloneBytes) {
    for (int i = 0; i < count; ++i) write(i);
    return;
  }
  constexpr int kTokensPerItem = 32;
  ThreadPool::instance().run((count + kTokensPerItem - 1) / kTokensPerItem, [&](int item) {
    const int end = std::min(count, (item + 1) * kTokensPerItem);
    for (int i = item * kTokensPerItem; i < end; ++i) write(i);
  });
}

void check_pages(const PageArray& pages, const std::vector<int>& page_ids) {
  for (size_t i = 0; i < page_ids.size(); ++i) {
    if (page_ids[i] >= 0 && page_ids[i] < pages.num_pages) continue;
    std::ostringstream text;
    text << "page id " << page_ids[i] << " at index " << i << " isn't one of pages 0 to " << pages.num_pages - 1;
    throw std::out_of_range(text.str());
  }
}

void copy_pages(const PageArray& pages, const std::vector<int>& sources, const std::vector<int>& targets) {
  const size_t bytes = pages.page_bytes();
  for (size_t i = 0; i < sources.size(); ++i)
    if (sources[i] != targets[i]) std::memcpy(pages.data + targets[i] * bytes, pages.data + sources[i] * bytes, bytes);
}

}  // namespace tinykv
