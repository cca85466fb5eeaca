#pragma once
// One attention call over paged keys and values, as pointers and numbers: nothing here knows mlx.
#include <cstdint>

#include "kernel_table.h"

namespace tinykv {

enum class MaskKind : int { none, boolean, additive };

// Pages (num_pages, kv_heads, page_size) of rows, contiguous, and which of them each row of a batch has.
struct Store {
  const char* keys = nullptr;
  Format key_format;
  const char* values = nullptr;
  Format value_format;
  int num_pages = 0;
  int table_width = 0;                   // with row_starts: of all rows
  const int32_t* block_table = nullptr;  // batch x table_width, or rows of any length
  const int32_t* row_starts = nullptr;   // batch: where a row begins; null: table_width apart

  int64_t row_start(int row) const { return row_starts ? row_starts[row] : int64_t(row) * table_width; }
  const int32_t* pages_of(int row) const { return block_table + row_start(row); }
};

// Shapes: queries (batch, query_heads, query_len, key_dim); out (batch, query_heads, query_len, value_dim), contiguous.
// Query i of row b is at position context_lens[b] - query_lens[b] + i.
struct Attention {
  int batch = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int query_len = 0;
  int key_dim = 0;
  int value_dim = 0;
  int page_size = 0;

  const char* queries = nullptr;
  Dtype dtype = Dtype::float32;  // of queries and out
  int64_t query_strides[4] = {};  // in elements
  Store closed;        // what queries read,
  Store open;          // but for tokens in a query's own page, which are read from here,
  bool opens = false;  // if this is set
  const int32_t* full_until = nullptr;  // batch: queries before this position read all tokens from the open store
  char* out = nullptr;

  const int32_t* context_lens = nullptr;  // batch
  const int32_t* query_lens = nullptr;    // batch; queries from there on are padding and give zeros

  float scale = 1;
  bool causal = false;  // a query sees positions up to its own; else up to the row's end
  int window = 0;       // positions a query looks back on, its own included; 0 for all
  int keep = 0;         // first positions that the window doesn't drop; only with one query per row
  float softcap = 0;
  const float* sinks = nullptr;  // query_heads, or null

  MaskKind mask = MaskKind::none;
  const char* mask_data = nullptr;  // bool or float, (batch, query_heads, query_len, positions) at its strides
  int64_t mask_strides[4] = {};
  int mask_positions = 0;

  int rows_per_token() const { return query_heads / kv_heads; }
};

// The positions that one query, or some, may see: [0, kept) and [begin, end), which is empty if it ends first.
struct Visible {
  int kept;
  int begin;
  int end;
};
// What query `token` of `row` sees, and what of it is in one of the stores.
Visible visible(const Attention& attention, int row, int token);
Visible visible_in(const Attention& attention, bool open, int row, int token);

// Throws std::out_of_range, with the numbers, if the call would read beyond the table, the pages or the mask. Every
// entry of the block table that the call reads is looked at.
void check(const Attention& attention);

// Computes `out`. The call must have passed check(). A row's result doesn't depend on the rest of the batch or on the
// number of threads.
void run(const Attention& attention);

}  // namespace tinykv
