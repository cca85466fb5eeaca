// MSL's scalar and vector types in C++17.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
#if defined(__aarch64__) && __GNUC__ < 13
typedef __fp16 half;  // rounded when stored, not after each operation
#else
typedef _Float16 half;
#endif

// Only explicit conversions from other types, as in MSL.
struct bfloat {
  uint16_t bits;

  static constexpr uint16_t rounded(float value) {
    const uint32_t u = __builtin_bit_cast(uint32_t, value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t(u >> 16 | 0x40);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  static constexpr bfloat of(uint16_t bits) {
    bfloat made{};
    made.bits = bits;
    return made;
  }

  bfloat() = default;
  template <class U, class = std::enable_if_t<std::is_arithmetic_v<U> || std::is_same_v<U, half>>>
  explicit constexpr bfloat(U value) : bits(rounded(float(value))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  constexpr bfloat operator-() const { return of(uint16_t(bits ^ 0x8000)); }

#define MSL_BFLOAT_OPERATOR(op)                                                                     \
  template <class A, class = std::enable_if_t<std::is_same_v<A, bfloat>>>                           \
  friend constexpr bfloat operator op(A a, A b) { return bfloat(float(a) op float(b)); }            \
  template <class A>                                                                                \
  constexpr std::enable_if_t<std::is_same_v<A, bfloat>, bfloat&> operator op##=(A b) {              \
    return *this = bfloat(float(*this) op float(b));                                                \
  }
  MSL_BFLOAT_OPERATOR(+)
  MSL_BFLOAT_OPERATOR(-)
  MSL_BFLOAT_OPERATOR(*)
  MSL_BFLOAT_OPERATOR(/)
#undef MSL_BFLOAT_OPERATOR
};

namespace metal {

using ::bfloat;
using ::half;
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;
using std::conditional;
using std::conditional_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_integral;
using std::is_same;
using std::is_same_v;
using std::ptrdiff_t;
using std::size_t;
using std::true_type;

template <class T>
constexpr bool is_floating_point_v =
    std::is_floating_point_v<T> || std::is_same_v<std::remove_cv_t<T>, half> || std::is_same_v<std::remove_cv_t<T>, bfloat>;
template <class T>
constexpr bool is_arithmetic_v = std::is_arithmetic_v<T> || is_floating_point_v<T>;

template <class T>
struct numeric_limits : std::numeric_limits<T> {};
template <>
struct numeric_limits<half> {
  static constexpr half of(uint16_t bits) { return __builtin_bit_cast(half, bits); }
  static constexpr half max() { return of(0x7bff); }
  static constexpr half min() { return of(0x0400); }
  static constexpr half lowest() { return of(0xfbff); }
  static constexpr half infinity() { return of(0x7c00); }
};
template <>
struct numeric_limits<bfloat> {
  static constexpr bfloat max() { return bfloat::of(0x7f7f); }
  static constexpr bfloat min() { return bfloat::of(0x0080); }
  static constexpr bfloat lowest() { return bfloat::of(0xff7f); }
  static constexpr bfloat infinity() { return bfloat::of(0x7f80); }
};

// Vectors have the size and alignment of MSL's (three elements take the room of four).
template <class T, int N>
struct vec;
template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  constexpr vec(T all) : x(all), y(all) {}
  constexpr vec(T x_, T y_) : x(x_), y(y_) {}
  constexpr T& operator[](int i) { return i ? y : x; }
  constexpr const T& operator[](int i) const { return i ? y : x; }
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  constexpr vec(T all) : x(all), y(all), z(all) {}
  constexpr vec(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
  constexpr T& operator[](int i) { return i == 0 ? x : i == 1 ? y : z; }
  constexpr const T& operator[](int i) const { return i == 0 ? x : i == 1 ? y : z; }
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  constexpr vec(T all) : x(all), y(all), z(all), w(all) {}
  constexpr vec(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
  constexpr T& operator[](int i) { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  constexpr const T& operator[](int i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};
#define MSL_VECTORS(T) \
  using T##2 = vec<T, 2>; \
  using T##3 = vec<T, 3>; \
  using T##4 = vec<T, 4>;
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS

template <class To, class From>
constexpr To as_type(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

}  // namespace metal
