#pragma once
// How the kernels go through query rows: several at once, as many as there are registers for.
#include "kernel_tokens.h"

namespace {

// Rows that share each vector of keys, and each vector of values, read from the pages.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kScoreRows = 2;
constexpr int kValueRows = 4;
constexpr int kValueVectors = 2;
#else
constexpr int kScoreRows = 4;
constexpr int kValueRows = 4;
constexpr int kValueVectors = 4;
#endif

// Rows and vectors of one tile of a matrix product.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif
constexpr int kTileRows = 6;

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls pass(first row, Constant<rows>, Constant<prefetch>) for kMost rows at a time. Only the first pass prefetches:
// it waits for memory, the later ones find the tokens in the cache.
template <int kMost, class Pass>
TINYKV_INLINE void for_few_rows(int rows, const Pass& pass) {
  int r = rows < kMost ? rows : kMost;
  if (r == kMost) pass(0, Constant<kMost>{}, Constant<1>{});
  else if (kMost > 3 && r == 3) pass(0, Constant<3>{}, Constant<1>{});
  else if (kMost > 2 && r == 2) pass(0, Constant<2>{}, Constant<1>{});
  else pass(0, Constant<1>{}, Constant<1>{});
  for (; r + kMost <= rows; r += kMost) pass(r, Constant<kMost>{}, Constant<0>{});
  if (kMost > 3 && rows - r == 3) pass(r, Constant<3>{}, Constant<0>{});
  else if (kMost > 2 && rows - r == 2) pass(r, Constant<2>{}, Constant<0>{});
  else if (rows - r == 1) pass(r, Constant<1>{}, Constant<0>{});
}

// Calls pass(first row, Constant<rows>) for kTileRows rows at a time.
template <class Pass>
TINYKV_INLINE void for_many_rows(int rows, const Pass& pass) {
  int r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) pass(r, Constant<kTileRows>{});
  for (; r + 3 <= rows; r += 3) pass(r, Constant<3>{});
  for (; r < rows; ++r) pass(r, Constant<1>{});
}

}  // namespace
