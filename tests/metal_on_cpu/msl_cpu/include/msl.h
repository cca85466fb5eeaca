// MSL as C++17, to be run on a CPU: address spaces vanish, math is computed in float and rounded to the type.
//
// Variables in threadgroup memory were rewritten before; see translate.py.
#pragma once
#include "msl_runtime.h"
#include "msl_types.h"

#define __METAL__ 1
#define __METAL_VERSION__ 320
#define METAL_FUNC inline __attribute__((always_inline))
#define device
#define constant
#define thread
#define threadgroup

namespace metal {

// ---- math ----
#define MSL_FLOAT template <class T, std::enable_if_t<is_floating_point_v<T>, int> = 0> METAL_FUNC T
#define MSL_UNARY(name, value)        \
  MSL_FLOAT name(T x_) {              \
    const float x = float(x_);        \
    return T(value);                  \
  }
#define MSL_BINARY(name, value)                   \
  MSL_FLOAT name(T x_, T y_) {                    \
    const float x = float(x_), y = float(y_);     \
    return T(value);                              \
  }
#define MSL_MATH                                                                                                 \
  MSL_UNARY(exp, std::exp(x)) MSL_UNARY(exp2, std::exp2(x)) MSL_UNARY(log, std::log(x)) MSL_UNARY(log2, std::log2(x)) \
  MSL_UNARY(sqrt, std::sqrt(x)) MSL_UNARY(rsqrt, 1.0f / std::sqrt(x)) MSL_UNARY(tanh, std::tanh(x))                \
  MSL_UNARY(sin, std::sin(x)) MSL_UNARY(cos, std::cos(x)) MSL_UNARY(floor, std::floor(x))                          \
  MSL_UNARY(ceil, std::ceil(x)) MSL_UNARY(round, std::round(x)) MSL_UNARY(fabs, std::fabs(x))                      \
  MSL_BINARY(pow, std::pow(x, y)) MSL_BINARY(atan2, std::atan2(x, y)) MSL_BINARY(fmax, std::fmax(x, y)) MSL_BINARY(fmin, std::fmin(x, y))
MSL_MATH
namespace precise {
MSL_MATH
}
namespace fast {
MSL_MATH
}
MSL_FLOAT fma(T x, T y, T z) { return T(std::fma(float(x), float(y), float(z))); }
template <class T>
METAL_FUNC constexpr T abs(T x) { return x < T(0) ? T(-x) : x; }
// If one of them is NaN, the other one.
template <class T>
METAL_FUNC constexpr T max(T x, T y) { return y != y ? x : x > y ? x : y; }
template <class T>
METAL_FUNC constexpr T min(T x, T y) { return y != y ? x : x < y ? x : y; }
template <class T>
METAL_FUNC constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T>
METAL_FUNC constexpr T select(T x, T y, bool second) { return second ? y : x; }
template <class T>
METAL_FUNC bool isnan(T x) { return x != x; }
template <class T>
METAL_FUNC bool isinf(T x) { return std::isinf(float(x)); }

// ---- barriers ----
enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) | unsigned(b)); }
inline void threadgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::threadgroup_wait(unsigned(flags), {file_, line_, "threadgroup_barrier"});
}
inline void simdgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::simdgroup_wait(unsigned(flags), {file_, line_, "simdgroup_barrier"});
}

// ---- functions of a simdgroup ----
namespace lanes {
template <class T>
METAL_FUNC T read(const unsigned char* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}
// Lane with lane in a butterfly, as hardware does; lanes that don't exist are left out.
template <class T, class Op>
MSL_UNCHECKED void reduce(msl::Exchange* exchange) {
  T value[32];
  uint32_t there = exchange->mask;
  for (int i = 0; i < 32; i++) {
    if (there >> i & 1) memcpy(&value[i], exchange->slot[i], sizeof(T));
  }
  for (int distance = 16; distance; distance /= 2) {
    T next[32] = {};
    uint32_t filled = 0;
    for (int i = 0; i < 32; i++) {
      const int j = i ^ distance;
      const bool mine = there >> i & 1, other = there >> j & 1;
      if (mine && other) {
        next[i] = Op::of(value[i < j ? i : j], value[i < j ? j : i]);
      } else if (mine || other) {
        next[i] = value[mine ? i : j];
      }
      if (mine || other) filled |= 1u << i;
    }
    memcpy(value, next, sizeof value);
    there = filled;
  }
  memcpy(exchange->result, &value[0], sizeof(T));
}
#define MSL_OP(name, value)  \
  struct name {              \
    template <class T>       \
    static T of(T a, T b) {  \
      return T(value);       \
    }                        \
  };
MSL_OP(Sum, a + b)
MSL_OP(Product, a * b)
MSL_OP(Max, metal::max(a, b))
MSL_OP(Min, metal::min(a, b))
MSL_OP(And, a & b)
MSL_OP(Or, a | b)
#undef MSL_OP
template <class Op, class T>
METAL_FUNC T reduced(T x, msl::Site site) {
  if constexpr (std::is_same_v<T, bfloat>) {
    return bfloat(reduced<Op>(float(x), site));
  } else {
    return read<T>(msl::simdgroup_meet(&x, sizeof x, &reduce<T, Op>, site)->result);
  }
}
// The value of lane `from(own lane)`, or `otherwise` where there is no such lane.
template <class T, class From>
METAL_FUNC T shuffled(T x, From from, T otherwise, msl::Site site) {
  const int lane = from(int(msl::position().lane));
  const msl::Exchange* exchange = msl::simdgroup_meet(&x, sizeof x, nullptr, site);
  return lane < 0 || lane > 31 || !(exchange->mask >> lane & 1) ? otherwise : read<T>(exchange->slot[lane]);
}
}  // namespace lanes

#define MSL_REDUCTION(name, op) \
  template <class T>            \
  METAL_FUNC T name(T x, MSL_SITE) { return lanes::reduced<lanes::op>(x, {file_, line_, #name}); }
MSL_REDUCTION(simd_sum, Sum)
MSL_REDUCTION(simd_product, Product)
MSL_REDUCTION(simd_max, Max)
MSL_REDUCTION(simd_min, Min)
MSL_REDUCTION(simd_and, And)
MSL_REDUCTION(simd_or, Or)
#define MSL_SHUFFLE(name, lane, otherwise)                                                            \
  template <class T>                                                                                  \
  METAL_FUNC T name(T x, ushort by, MSL_SITE) {                                                       \
    return lanes::shuffled(x, [by](int own) { return (void)own, lane; }, otherwise, {file_, line_, #name}); \
  }
MSL_SHUFFLE(simd_shuffle, int(by), T())
MSL_SHUFFLE(simd_broadcast, int(by), T())
MSL_SHUFFLE(simd_shuffle_down, own + by, x)
MSL_SHUFFLE(simd_shuffle_up, own - by, x)
MSL_SHUFFLE(simd_shuffle_xor, own ^ by, x)
template <class T>
METAL_FUNC T simd_shuffle_and_fill_up(T x, T filling, ushort by, MSL_SITE) {
  const int own = msl::position().lane;
  const T shifted = lanes::shuffled(x, [by](int lane) { return lane - by; }, x, {file_, line_, "simd_shuffle_and_fill_up"});
  const T filled = lanes::shuffled(
      filling, [by](int lane) { return lane - by + 32; }, filling, {file_, line_, "simd_shuffle_and_fill_up"});
  return own < by ? filled : shifted;
}
template <class T>
METAL_FUNC T simd_prefix_inclusive_sum(T x, MSL_SITE) {
  const msl::Exchange* exchange = msl::simdgroup_meet(&x, sizeof x, nullptr, {file_, line_, "simd_prefix_inclusive_sum"});
  T sum = T(0);
  for (uint lane = 0; lane <= msl::position().lane; lane++) sum = T(sum + lanes::read<T>(exchange->slot[lane]));
  return sum;
}
METAL_FUNC bool simd_all(bool x, MSL_SITE) { return lanes::reduced<lanes::And>(int(x), {file_, line_, "simd_all"}); }
METAL_FUNC bool simd_any(bool x, MSL_SITE) { return lanes::reduced<lanes::Or>(int(x), {file_, line_, "simd_any"}); }

struct os_log {
  template <class... A>
  constexpr os_log(A...) {}
  template <class... A>
  void log_debug(A...) const {}
};

}  // namespace metal

#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

namespace msl {

// What a kernel asks for by an attribute, as whatever type it declares.
struct Three {
  const uint32_t* v;
  operator uint32_t() const { return v[0]; }
  operator metal::vec<uint, 2>() const { return {v[0], v[1]}; }
  operator metal::vec<uint, 3>() const { return {v[0], v[1], v[2]}; }
};
struct One {
  uint32_t v;
  operator uint32_t() const { return v; }
};
inline Three attribute_thread_position_in_grid() { return {position().thread_in_grid}; }
inline Three attribute_thread_position_in_threadgroup() { return {position().thread_in_group}; }
inline Three attribute_threadgroup_position_in_grid() { return {position().group_in_grid}; }
inline Three attribute_threads_per_grid() { return {position().grid}; }
inline Three attribute_threadgroups_per_grid() { return {position().groups}; }
inline Three attribute_threads_per_threadgroup() { return {position().group_size}; }
inline One attribute_thread_index_in_simdgroup() { return {position().lane}; }
inline One attribute_simdgroup_index_in_threadgroup() { return {position().simdgroup}; }
inline One attribute_thread_index_in_threadgroup() { return {position().thread_index}; }
inline One attribute_simdgroups_per_threadgroup() { return {position().simdgroups}; }
inline One attribute_threads_per_simdgroup() { return {32}; }

}  // namespace msl
