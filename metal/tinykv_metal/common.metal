// What the kernels share: how a token's elements lie in a simdgroup's lanes, and the arithmetic of softmax.
//
// The 32 lanes of a simdgroup hold one token of one head together. A lane reads runs of `lane_run` neighbouring
// elements, as wide as the head dim allows, so that the simdgroup reads a run of memory at each step.

using namespace metal;

// Arrays of a thread are registers only where the loops over them are unrolled.
#define UNROLL _Pragma("clang loop unroll(full)")

template <int D>
constexpr int lane_run() {
  return D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1;
}

// Elements a lane holds; where 32 lanes don't divide the head dim, the last of some lanes stand for nothing.
template <int D>
constexpr int lane_size() {
  return (D + 32 * lane_run<D>() - 1) / (32 * lane_run<D>()) * lane_run<D>();
}

// The place in the head dim of a lane's element `i`.
template <int D>
METAL_FUNC int lane_dim(int i, int lane) {
  return (i / lane_run<D>() * 32 + lane) * lane_run<D>() + i % lane_run<D>();
}

// The first element of a token's K or V in a pool (num_pages, kv_heads, page_size, head_dim); 64 bits, as pools may
// have more than 2^31 elements.
METAL_FUNC int64_t token_offset(int page, int head, int slot, int heads, int page_size, int dim) {
  return ((int64_t(page) * heads + head) * page_size + slot) * dim;
}

template <typename T, int RUN>
struct Run {
  static METAL_FUNC void load(const device T* from, thread float* to) {
    const vec<T, RUN> run = *(const device vec<T, RUN>*)from;
    UNROLL for (int i = 0; i < RUN; i++) {
      to[i] = float(run[i]);
    }
  }
};

template <typename T>
struct Run<T, 1> {
  static METAL_FUNC void load(const device T* from, thread float* to) { to[0] = float(from[0]); }
};

// The loader: this lane's share of one token's K or V. Everything that reads pages for attention goes through it, or
// through Row below, which also reads quantized ones.
template <int D, typename T>
METAL_FUNC void load_token(const device T* token, int lane, thread float* to) {
  constexpr int run = lane_run<D>();
  UNROLL for (int i = 0; i < lane_size<D>(); i += run) {
    const int dim = lane_dim<D>(i, lane);
    if (D % 32 == 0 || dim < D) {
      Run<T, run>::load(token + dim, to + i);
    } else {
      to[i] = 0.0f;
    }
  }
}

// A token's row in a pool. Packed: D elements of BITS bits, least significant first, then a scale for each GROUP of
// them, then as many biases, both of type S.
template <int D, int BITS, int GROUP, typename S>
struct Row {
  static METAL_FUNC void load(const device uint* row, int lane, thread float* to) {
    const device S* scales = (const device S*)(row + D * BITS / 32);
    UNROLL for (int i = 0; i < lane_size<D>(); i += lane_run<D>()) {
      const int dim = lane_dim<D>(i, lane);
      const float scale = float(scales[dim / GROUP]);
      const float bias = float(scales[D / GROUP + dim / GROUP]);
      UNROLL for (int j = 0; j < lane_run<D>(); j++) {
        const int bit = (dim + j) * BITS;
        uint element = row[bit / 32] >> (bit % 32);
        if (32 % BITS != 0 && bit % 32 + BITS > 32) {
          element |= row[bit / 32 + 1] << (32 - bit % 32);
        }
        to[i + j] = scale * float(element & ((1u << BITS) - 1u)) + bias;
      }
    }
  }
};

template <int D, int GROUP, typename S>
struct Row<D, 0, GROUP, S> {
  template <typename T>
  static METAL_FUNC void load(const device T* row, int lane, thread float* to) {
    load_token<D>(row, lane, to);
  }
};

// Whether some query of a row may see a position: before `end`, and not behind all windows. Otherwise nothing is read
// there: the page may be gone.
METAL_FUNC bool in_reach(int position, int end, int low, int keep) {
  return position < end && (position >= low || position < keep);
}

// The first position that a query at `own` reads from open pages: that of its page, or the first of all.
METAL_FUNC int first_open(int own, int page_size, int full_until) {
  return own < full_until ? 0 : own / page_size * page_size;
}

// What a maximum of `from` is worth under the maximum `to`; a part that saw no token counts for nothing.
METAL_FUNC float softmax_factor(float from, float to) {
  return from == -INFINITY ? 0.0f : fast::exp(from - to);
}

// The highest of COUNT maxima.
template <int COUNT>
METAL_FUNC float highest(const threadgroup float* tops) {
  float top = -INFINITY;
  for (int i = 0; i < COUNT; i++) {
    top = max(top, tops[i]);
  }
  return top;
}

// One output element from the sums of softmax: `sum` weights under the maximum `top`, and the sink if there is one.
// A query that sees nothing gets 0.
METAL_FUNC float softmax_finish(float value, float sum, float top, bool has_sink, float sink) {
  if (has_sink) {
    const float higher = max(top, sink);
    const float factor = softmax_factor(top, higher);
    value *= factor;
    sum = sum * factor + fast::exp(sink - higher);
  }
  return sum > 0.0f ? value / sum : 0.0f;
}

// A pool that is written in place, though mlx declares inputs as const.
template <typename T>
METAL_FUNC device T* writable(const device T* pool) {
  return const_cast<device T*>(pool);
}
