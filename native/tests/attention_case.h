#pragma once
// A call of attention over pages: its shape, and its arrays with random numbers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attention.h"
#include "numbers.h"

namespace test {

using namespace tinykv;

struct Case {
  std::vector<int> contexts;
  int queries = 1;
  int query_heads = 4;
  int kv_heads = 2;
  int key_dim = 64;
  int value_dim = 64;
  int page_size = 16;
  Dtype dtype = Dtype::float32;
  bool causal = true;
  int window = 0;
  int keep = 0;
  float softcap = 0;
  bool sinks = false;
  MaskKind mask = MaskKind::none;
  int key_bits = 0;
  int value_bits = 0;
  int group_size = 64;
  bool open = false;
  int full_until = 0;

  Format keys() const { return {dtype, key_bits, key_bits ? group_size : 0}; }
  Format values() const { return {dtype, value_bits, value_bits ? group_size : 0}; }
};

// A case's arrays, in heap memory of exactly their size; slots without a token are NaN.
struct Memory {
  Attention attention;
  std::vector<char> queries, keys, values, open_keys, open_values, out;
  std::vector<int32_t> table, open_table, full_until, contexts, query_lens;
  std::vector<float> sinks, additive;
  std::vector<uint8_t> boolean;

  explicit Memory(const Case& c);
};

inline void place(std::vector<char>& pages, const std::vector<char>& rows, size_t from, size_t to, size_t bytes) {
  std::memcpy(&pages[to * bytes], &rows[from * bytes], bytes);
}

// A power of two, or minus one, as `dtype`.
inline void append(std::vector<char>& to, float x, Dtype dtype) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  uint32_t narrow = bits >> 16;
  if (dtype == Dtype::float16) narrow = (bits >> 31 << 15) | (((bits >> 23 & 0xff) - 112) << 10);
  const char* bytes = reinterpret_cast<const char*>(dtype == Dtype::float32 ? &bits : &narrow);
  to.insert(to.end(), bytes, bytes + size_of(dtype));
}

// Random rows in `format`.
inline std::vector<char> random_rows(size_t count, int dim, const Format& format, int seed) {
  if (format.bits == 0) return random_numbers(count * dim, format.dtype, seed);
  std::mt19937 random(seed);
  std::vector<char> rows;
  for (size_t i = 0; i < count; ++i) {
    for (size_t byte = 0; byte < format.packed_bytes(dim); ++byte) rows.push_back(char(random()));
    const int groups = dim / format.group_size;
    for (int g = 0; g < groups; ++g) append(rows, std::ldexp(1.f, int(random() % 2) - format.bits), format.dtype);
    for (int g = 0; g < groups; ++g) append(rows, random() % 2 ? -1.f : -0.5f, format.dtype);
  }
  return rows;
}

inline Memory::Memory(const Case& c) {
  const int batch = int(c.contexts.size());
  const int longest = *std::max_element(c.contexts.begin(), c.contexts.end());
  const int width = (longest + c.page_size - 1) / c.page_size + 1, pages = batch * width;
  std::vector<int> ids(pages);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(7));

  const size_t slots = size_t(pages) * c.kv_heads * c.page_size;
  const Format full{c.dtype};
  for (const bool open : {false, true}) {
    if (open && !c.open) continue;
    (open ? open_keys : keys).resize(slots * (open ? full : c.keys()).row_bytes(c.key_dim));
    (open ? open_values : values).resize(slots * (open ? full : c.values()).row_bytes(c.value_dim));
    for (auto* rows : {open ? &open_keys : &keys, open ? &open_values : &values}) poison(*rows);
  }
  const size_t tokens = size_t(batch) * longest * c.kv_heads;
  queries = random_numbers(size_t(batch) * c.query_heads * c.queries * c.key_dim, c.dtype, 3);
  out.resize(size_t(batch) * c.query_heads * c.queries * c.value_dim * size_of(c.dtype));

  table.assign(size_t(pages), -1);
  open_table = table;
  for (int row = 0; row < batch; ++row) {
    contexts.push_back(c.contexts[row]);
    query_lens.push_back(std::min(c.queries, c.contexts[row]));
    full_until.push_back(c.full_until);
  }
  for (const bool open : {false, true}) {
    if (open && !c.open) continue;
    const Format key_format = open ? full : c.keys(), value_format = open ? full : c.values();
    const size_t key_bytes = key_format.row_bytes(c.key_dim), value_bytes = value_format.row_bytes(c.value_dim);
    const auto new_keys = random_rows(tokens, c.key_dim, key_format, open ? 4 : 1);
    const auto new_values = random_rows(tokens, c.value_dim, value_format, open ? 5 : 2);
    for (int row = 0; row < batch; ++row) {
      // What no query can see is missing.
      const int context = c.contexts[row], oldest = context - query_lens[row];
      int first = c.window && c.keep == 0 ? std::max(0, context - c.window - c.queries + 1) : 0;
      int last = context;
      auto own = [&](int position) { return position < c.full_until ? 0 : position / c.page_size * c.page_size; };
      if (open) first = own(oldest);
      if (c.open && !open && context > 0) last = own(context - 1);
      for (int position = first; position < last; ++position) {
        // Open pages are other ones.
        const int page = row * width + position / c.page_size, id = ids[open ? pages - 1 - page : page];
        (open ? open_table : table)[page] = id;
        for (int head = 0; head < c.kv_heads; ++head) {
          const size_t from = (size_t(row) * longest + position) * c.kv_heads + head;
          const size_t to = (size_t(id) * c.kv_heads + head) * c.page_size + position % c.page_size;
          place(open ? open_keys : keys, new_keys, from, to, key_bytes);
          place(open ? open_values : values, new_values, from, to, value_bytes);
        }
      }
    }
  }
  for (int head = 0; head < c.query_heads; ++head) sinks.push_back(0.5f * head);
  for (int i = 0; i < c.queries * longest; ++i) {
    boolean.push_back(i % 3 != 0);
    additive.push_back(i % 5 == 0 ? -INFINITY : 0.1f * (i % 7));
  }

  Attention& a = attention;
  a.batch = batch;
  a.query_heads = c.query_heads;
  a.kv_heads = c.kv_heads;
  a.query_len = c.queries;
  a.key_dim = c.key_dim;
  a.value_dim = c.value_dim;
  a.page_size = c.page_size;
  a.closed = {keys.data(), c.keys(), values.data(), c.values(), pages, width, table.data()};
  a.opens = c.open;
  a.full_until = full_until.data();
  if (c.open) a.open = {open_keys.data(), full, open_values.data(), full, pages, width, open_table.data()};
  a.queries = queries.data();
  a.dtype = c.dtype;
  const int64_t token = c.key_dim, head = token * c.queries;
  std::copy_n(std::initializer_list<int64_t>{head * c.query_heads, head, token, 1}.begin(), 4, a.query_strides);
  a.out = out.data();
  a.context_lens = contexts.data();
  a.query_lens = query_lens.data();
  a.scale = 1 / std::sqrt(float(c.key_dim));
  a.causal = c.causal;
  a.window = c.window;
  a.keep = c.keep;
  a.softcap = c.softcap;
  a.sinks = c.sinks ? sinks.data() : nullptr;
  a.mask = c.mask;
  a.mask_data = c.mask == MaskKind::boolean ? reinterpret_cast<const char*>(boolean.data())
                                            : reinterpret_cast<const char*>(additive.data());
  a.mask_strides[2] = longest;
  a.mask_strides[3] = 1;
  a.mask_positions = longest;
}

}  // namespace test
