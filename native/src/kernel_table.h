#pragma once
// What crosses from the scheduler to the kernels, which are compiled once per instruction set. No header of the C++
// library may be included here or in a kernel: the linker keeps one copy of an inline function, and it may be the one
// that was compiled for AVX-512.
#include <stddef.h>
#include <stdint.h>

namespace tinykv {

enum class Dtype : int { float32, bfloat16, float16 };
constexpr int kDtypes = 3;

constexpr size_t size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

// How one token's elements in one head are stored: as `dtype`, or packed as mlx packs them: `bits` an element, least
// significant first, then a scale for each `group_size` elements, then as many biases, both as `dtype`.
struct Format {
  Dtype dtype = Dtype::float32;
  int bits = 0;  // 0: not packed
  int group_size = 0;

  constexpr size_t packed_bytes(int dim) const { return size_t(dim) * bits / 8; }
  constexpr size_t row_bytes(int dim) const {
    return bits == 0 ? dim * size_of(dtype) : packed_bytes(dim) + 2 * (dim / group_size) * size_of(dtype);
  }
};
constexpr int kLeastGroup = 32;

// The context is split into parts at multiples of kPart tokens, whatever the batch, the threads and the page size, so
// that a row's result is the same, bit for bit, alone or in any batch. Inside a part kBlock tokens are scored at once.
constexpr int kPart = 512;
constexpr int kBlock = 64;

// Rows of floats that kernels read and write are this long at least: the widest vector can be used to the end.
constexpr int kPad = 16;
constexpr int padded(int dim) {
  return (dim + kPad - 1) / kPad * kPad;
}

// Running softmax of some query rows: `out` is rows x padded(value_dim), not yet divided by `sum`; `max` is in units
// of log2. Rows that saw nothing have max = -inf, sum = 0 and out = 0.
struct Partial {
  float* out;
  float* max;
  float* sum;
};

// Some query rows against at most kPart tokens.
struct Part {
  const float* queries;  // rows x padded(key_dim), times scale * log2(e); zero beyond key_dim
  int rows;
  int key_dim;
  int value_dim;
  Format key_format;
  Format value_format;
  const char* const* keys;    // one pointer per token; kBlock more follow, which are only prefetched
  const char* const* values;
  int tokens;
  const int* first;   // per row: the tokens it sees are [first, last), cut to [0, tokens)
  const int* last;
  const float* bias;  // rows x kPart, natural units, -inf hides a token; null for none
  float softcap;      // scores become softcap * tanh(score / softcap); 0 for none
  float* scratch;     // scratch_floats() of them
};

// Rows of a (heads, tokens, dim) array: row r is head r % heads of token r / heads.
struct RowsView {
  const char* data;
  Dtype dtype;
  int heads;
  int64_t head_stride;  // in elements
  int64_t token_stride;
  int64_t dim_stride;
};

struct Kernels {
  const char* name;
  // Floats of scratch for `rows` query rows.
  size_t (*scratch_floats)(int rows, int key_dim, int value_dim);
  // Converts rows of queries to floats, scaled and padded with zeros.
  void (*load_rows)(const RowsView& from, int rows, int dim, float scale, float* to);
  // Attention of the rows over one part; overwrites `partial`.
  void (*attend_part)(const Part& part, const Partial& partial);
  // Takes `more` into `total`; the order of calls decides the rounding.
  void (*merge)(int rows, int value_dim, const Partial& total, const Partial& more);
  // Adds a sink per row (row r takes sinks[r % heads]; null for none), divides, converts and stores contiguous rows
  // of `dim` elements, head after head of token after token, at the strides of `to`.
  void (*store_rows)(const Partial& partial, int rows, int dim, const float* sinks, const RowsView& to);
};

const Kernels* kernels_base();
#if defined(__x86_64__) || defined(_M_X64)
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
#endif

}  // namespace tinykv
