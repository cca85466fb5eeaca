#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace tinykv {
namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  text << "paged attention: ";
  (text << ... << parts);
  throw std::out_of_range(text.str());
}

void check_pages(const Attention& attention, int row, int begin, int end) {
  const int32_t* table = attention.pages_of(row);
  for (int page = begin / attention.page_size; page * int64_t(attention.page_size) < end; ++page)
    if (table[page] < 0 || table[page] >= attention.num_pages)
      refuse("block_table[", row, "][", page, "] is ", table[page], ", but there are pages 0 to ",
             attention.num_pages - 1, " and row ", row, " reads positions ", begin, " to ", end - 1, " (page_size ",
             attention.page_size, ")");
}

}  // namespace

Visible visible(const Attention& attention, int row, int token) {
  const int context = attention.context_lens[row];
  const int seen = context - attention.query_lens[row] + token + 1;  // its own position included
  Visible range{0, 0, attention.causal ? seen : context};
  if (attention.window > 0 && seen > attention.window) {
    range.kept = attention.keep;
    range.begin = seen - (attention.window - attention.keep);
  }
  return range;
}

void check(const Attention& attention) {
  for (int row = 0; row < attention.batch; ++row) {
    const int64_t start = attention.row_start(row);
    if (attention.row_starts && (start < 0 || start > attention.table_width))
      refuse("row_starts[", row, "] is ", start, ", but there are ", attention.table_width, " page ids");
    const int64_t width = attention.table_width - (attention.row_starts ? start : 0);
    const int64_t room = width * attention.page_size;
    const int context = attention.context_lens[row], queries = attention.query_lens[row];
    if (context < 0 || context > room)
      refuse("context_lens[", row, "] is ", context, ", but a block table of ", width, " pages of ",
             attention.page_size, " tokens has room for 0 to ", room);
    if (queries < 0 || queries > attention.query_len || queries > context)
      refuse("query_lens[", row, "] is ", queries, ", but there are ", attention.query_len, " queries and ", context,
             " tokens of context");
    if (attention.keep > 0 && queries > 1)
      refuse("keep=", attention.keep, " needs one query per row, but query_lens[", row, "] is ", queries);
    if (queries == 0) continue;
    if (attention.mask != MaskKind::none && attention.mask_positions < context)
      refuse("the mask has ", attention.mask_positions, " positions, but context_lens[", row, "] is ", context);
    const Visible first = visible(attention, row, 0), last = visible(attention, row, queries - 1);
    check_pages(attention, row, 0, first.kept);
    check_pages(attention, row, first.begin, last.end);
  }
}

}  // namespace tinykv
