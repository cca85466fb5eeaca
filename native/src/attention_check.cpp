#include <algorithm>
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

const char* which(const Attention& attention, const Store& store) {
  return &store == &attention.open ? "open " : "";
}

void check_pages(const Attention& attention, const Store& store, int row, int begin, int end) {
  const int32_t* table = store.pages_of(row);
  for (int page = begin / attention.page_size; page * int64_t(attention.page_size) < end; ++page)
    if (table[page] < 0 || table[page] >= store.num_pages)
      refuse(which(attention, store), "block_table[", row, "][", page, "] is ", table[page],
             ", but there are pages 0 to ", store.num_pages - 1, " and row ", row, " reads positions ", begin, " to ", end - 1, " (page_size ",
             attention.page_size, ")");
}

void check_room(const Attention& attention, const Store& store, int row) {
  const int64_t start = store.row_start(row);
  if (store.row_starts && (start < 0 || start > store.table_width))
    refuse("row_starts[", row, "] is ", start, ", but there are ", store.table_width, " page ids");
  const int64_t width = store.table_width - (store.row_starts ? start : 0);
  const int64_t room = width * attention.page_size;
  const int context = attention.context_lens[row];
  if (context < 0 || context > room)
    refuse("context_lens[", row, "] is ", context, ", but ", &store == &attention.open ? "an open" : "a", " block table of ", width,
           " pages of ", attention.page_size, " tokens has room for 0 to ", room);
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

Visible visible_in(const Attention& attention, bool open, int row, int token) {
  Visible range = visible(attention, row, token);
  if (!attention.opens) return range;
  const int position = attention.context_lens[row] - attention.query_lens[row] + token;
  const int own = position < attention.full_until[row] ? 0 : position / attention.page_size * attention.page_size;
  if (open) {
    if (own > 0) range.kept = 0;
    range.begin = std::max(range.begin, own);
  } else {
    range.kept = std::min(range.kept, own);
    range.end = std::min(range.end, own);  // before the beginning, where a window begins in the own page
  }
  return range;
}

void check(const Attention& attention) {
  if (attention.opens && attention.keep > attention.page_size)
    refuse("keep=", attention.keep, " is more than a page of ", attention.page_size, " tokens");
  for (int row = 0; row < attention.batch; ++row) {
    check_room(attention, attention.closed, row);
    if (attention.opens) check_room(attention, attention.open, row);
    const int context = attention.context_lens[row], queries = attention.query_lens[row];
    if (queries < 0 || queries > attention.query_len || queries > context)
      refuse("query_lens[", row, "] is ", queries, ", but there are ", attention.query_len, " queries and ", context,
             " tokens of context");
    if (attention.keep > 0 && queries > 1)
      refuse("keep=", attention.keep, " needs one query per row, but query_lens[", row, "] is ", queries);
    if (queries > 1 && attention.opens && !attention.causal)
      refuse("open pages need one query per row or causal ones, but query_lens[", row, "] is ", queries);
    if (queries == 0) continue;
    if (attention.mask != MaskKind::none && attention.mask_positions < context)
      refuse("the mask has ", attention.mask_positions, " positions, but context_lens[", row, "] is ", context);
    for (const bool open : {false, true}) {
      if (open && !attention.opens) continue;
      const Store& store = open ? attention.open : attention.closed;
      const Visible first = visible_in(attention, open, row, 0);
      const Visible last = visible_in(attention, open, row, queries - 1);
      check_pages(attention, store, row, 0, first.kept);
      check_pages(attention, store, row, first.begin, last.end);
    }
  }
}

}  // namespace tinykv
