// In place of mlx's, whose constructors are overloaded by address space.
#pragma once
template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T real_ = 0, T imag_ = 0) : real(real_), imag(imag_) {}
};
using complex64_t = complex_t<float>;
