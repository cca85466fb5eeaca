#include "attention_part.h"

#include <algorithm>
#include <limits>

#include "dispatch.h"

namespace tinykv {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

template <class T>
void grow(std::vector<T>& storage, size_t size) {
  if (storage.size() < size) storage.resize(size);
}

}  // namespace

size_t partial_floats(int rows, int value_dim) {
  return size_t(rows) * (padded(value_dim) + 2);
}

Partial partial_in(float* block, int rows, int value_dim) {
  float* max = block + size_t(rows) * padded(value_dim);
  return {block, max, max + rows};
}

void PartWorker::open(const Attention& attention, const Unit& unit) {
  const int heads = attention.rows_per_token();
  rows_ = heads * unit.tokens;
  value_stride_ = attention.value_dim;
  grow(queries_, size_t(rows_) * padded(attention.key_dim));
  grow(scratch_, kernels().scratch_floats(rows_, attention.key_dim, attention.value_dim));
  grow(first_, rows_);
  grow(last_, rows_);
  const int64_t* strides = attention.query_strides;
  const int64_t start =
      unit.row * strides[0] + int64_t(unit.kv_head) * heads * strides[1] + unit.first_token * strides[2];
  const RowsView view{attention.queries + start * int64_t(size_of(attention.dtype)), attention.dtype, heads, strides[1],
                      strides[2], strides[3]};
  kernels().load_rows(view, rows_, attention.key_dim, attention.scale, queries_.data());
}

Partial PartWorker::own(int which) {
  grow(partials_[which], partial_floats(rows_, value_stride_));
  return partial_in(partials_[which].data(), rows_, value_stride_);
}

void PartWorker::attend(const Attention& attention, const Unit& unit, int n, const Partial& partial,
                        const NextPart& next) {
  // The tokens of this part that any of the queries sees
  const bool open = unit.is_open(n);
  const Visible& seen = unit.sight(n).seen;
  const int start = unit.part(n) * kPart, stop = start + kPart;
  const int kept = std::clamp(seen.kept, start, stop);
  const int begin = std::max(start, seen.begin), end = std::min(stop, seen.end);
  int tokens = list_tokens(attention, unit, open, start, kept, 0);
  tokens = list_tokens(attention, unit, open, begin, end, tokens);

  // Behind them the first of the next part, which is fetched while the last of this one are read
  int listed = tokens;
  if (next.unit != nullptr) {
    const Visible& following = next.unit->sight(next.n).seen;
    const int first = std::max(next.unit->part(next.n) * kPart, following.begin);
    const int last = std::min(first + kBlock, following.end);
    listed = list_tokens(attention, *next.unit, next.unit->is_open(next.n), first, last, tokens);
  }
  for (; listed < tokens + kBlock; ++listed) {
    keys_[listed] = listed > 0 ? keys_[listed - 1] : nullptr;
    values_[listed] = listed > 0 ? values_[listed - 1] : nullptr;
  }

  // Which of them each query sees
  limit_rows(attention, unit, open, begin, tokens);
  if (attention.mask != MaskKind::none) {
    grow(bias_, size_t(rows_) * kPart);
    read_mask(attention, unit, start, kept, 0);
    read_mask(attention, unit, begin, end, kept - start);
  }

  Part part{};
  part.queries = queries_.data();
  part.rows = rows_;
  part.key_dim = attention.key_dim;
  part.value_dim = attention.value_dim;
  const Store& store = open ? attention.open : attention.closed;
  part.key_format = store.key_format;
  part.value_format = store.value_format;
  part.keys = keys_;
  part.values = values_;
  part.tokens = tokens;
  part.first = first_.data();
  part.last = last_.data();
  part.bias = attention.mask == MaskKind::none ? nullptr : bias_.data();
  part.softcap = attention.softcap;
  part.scratch = scratch_.data();
  kernels().attend_part(part, partial);
}

// Appends pointers to the keys and values of positions [begin, end) after the first `count`; returns the new count.
int PartWorker::list_tokens(const Attention& attention, const Unit& unit, bool open, int begin, int end, int count) {
  const Store& store = open ? attention.open : attention.closed;
  const int page_size = attention.page_size;
  const int32_t* table = store.pages_of(unit.row);
  const size_t key_bytes = store.key_format.row_bytes(attention.key_dim);
  const size_t value_bytes = store.value_format.row_bytes(attention.value_dim);
  for (int position = begin; position < end;) {
    const int offset = position % page_size, run = std::min(end - position, page_size - offset);
    const size_t slot = (size_t(table[position / page_size]) * attention.kv_heads + unit.kv_head) * page_size + offset;
    const char* key = store.keys + slot * key_bytes;
    const char* value = store.values + slot * value_bytes;
    for (int i = 0; i < run; ++i, key += key_bytes, value += value_bytes) {
      keys_[count + i] = key;
      values_[count + i] = value;
    }
    count += run;
    position += run;
  }
  return count;
}

// Sets each row's range among the listed tokens, the first of which (the first not kept) is at position `begin`.
void PartWorker::limit_rows(const Attention& attention, const Unit& unit, bool open, int begin, int tokens) {
  const int heads = attention.rows_per_token();
  for (int token = 0; token < unit.tokens; ++token) {
    int first = 0, last = tokens;
    if (unit.tokens > 1) {
      const Visible seen = visible_in(attention, open, unit.row, unit.first_token + token);
      first = seen.begin - begin;
      last = seen.end - begin;
    }
    std::fill_n(first_.begin() + token * heads, heads, first);
    std::fill_n(last_.begin() + token * heads, heads, last);
  }
}

// Reads the mask of positions [begin, end) into columns `column` on of each row's bias.
void PartWorker::read_mask(const Attention& attention, const Unit& unit, int begin, int end, int column) {
  const int heads = attention.rows_per_token();
  const int64_t* strides = attention.mask_strides;
  for (int r = 0; r < rows_; ++r) {
    const int64_t row = unit.row * strides[0] + (unit.kv_head * heads + r % heads) * strides[1] +
                        (unit.first_token + r / heads) * strides[2];
    float* bias = bias_.data() + size_t(r) * kPart + column;
    if (attention.mask == MaskKind::boolean) {
      const auto* mask = reinterpret_cast<const uint8_t*>(attention.mask_data) + row;
      for (int i = begin; i < end; ++i) *bias++ = mask[i * strides[3]] ? 0.f : kHidden;
    } else {
      const auto* mask = reinterpret_cast<const float*>(attention.mask_data) + row;
      for (int i = begin; i < end; ++i) *bias++ = mask[i * strides[3]];
    }
  }
}

}  // namespace tinykv
