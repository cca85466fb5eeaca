#pragma once
// The operations as nodes of mlx's lazy graph. Pools are inputs that writes change in place; what orders reads and
// writes is the small token that each of them returns and later ones take as an input.
#include <optional>
#include <utility>
#include <vector>

#include "attention.h"
#include "mlx/array.h"
#include "mlx/utils.h"

namespace tinykv {

namespace mx = mlx::core;

// A layer's pages and what must have happened before they are used.
struct Pages {
  mx::array keys;
  mx::array values;
  std::optional<mx::array> written;
  std::optional<mx::array> last_read;
};

// How one side's pages are packed: rows of 32-bit words of `dim` elements, see Format; 0 bits: they are not.
struct Packing {
  int bits = 0;
  int group_size = 0;
  int dim = 0;
  mx::Dtype dtype = mx::float32;  // of scales and biases
};

// Attention settings that are plain numbers.
struct AttentionOptions {
  float scale = 1;
  bool causal = false;
  int window = 0;
  int keep = 0;
  float softcap = 0;
  Packing keys = {};
  Packing values = {};
};

// Pages, and which of them each row of a batch has: row r of block_table or, with row_starts, from where these say on in
// a block_table of one axis.
struct Rows {
  Pages pages;
  mx::array block_table;
  std::optional<mx::array> row_starts;
};

// Pages that aren't packed, for the tokens of a query's own page; and for all tokens where a query is before the position
// that full_until has for its row.
struct OpenRows {
  Rows rows;
  mx::array full_until;
};

// Returns the output, (batch, query_heads, query_len, value_dim) in the dtype of the queries, and a token.
std::pair<mx::array, mx::array> attend(
    const Rows& rows, const std::optional<OpenRows>& open, const mx::array& queries, const mx::array& context_lens,
    const mx::array& query_lens, const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    const AttentionOptions& options);

// Each returns a token. Waits for reads of the pages so far, as it overwrites what they may need.
mx::array write_pages(
    const Pages& pages, const mx::array& slot_mapping, const mx::array& keys, const mx::array& values);
mx::array copy_pages(const Pages& pages, std::vector<int> sources, std::vector<int> targets);

}  // namespace tinykv
