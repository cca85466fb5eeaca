#pragma once
// Query rows in and output rows out: conversion between the array's dtype and strides and padded rows of floats.
#include "kernel_softmax.h"

namespace {

using tinykv::RowsView;

template <class T>
void load_rows_as(const RowsView& from, int rows, int dim, float scale, float* to) {
  const int stride = tinykv::padded(dim), whole = from.dim_stride == 1 ? dim / kLanes * kLanes : 0;
  for (int r = 0; r < rows; ++r) {
    const T* row = (const T*)from.data + (r % from.heads) * from.head_stride + (r / from.heads) * from.token_stride;
    float* padded_row = to + (size_t)r * stride;
    for (int d = 0; d < whole; d += kLanes) store(padded_row + d, load(row + d) * scale);
    for (int d = whole; d < dim; ++d) padded_row[d] = to_float(row[d * from.dim_stride]) * scale;
    for (int d = dim; d < stride; ++d) padded_row[d] = 0;
  }
}

void load_rows(const RowsView& from, int rows, int dim, float scale, float* to) {
  const float scale_log2 = scale * kLog2e;
  if (from.dtype == tinykv::Dtype::float32) load_rows_as<float>(from, rows, dim, scale_log2, to);
  else if (from.dtype == tinykv::Dtype::bfloat16) load_rows_as<Bfloat16>(from, rows, dim, scale_log2, to);
  else load_rows_as<Float16>(from, rows, dim, scale_log2, to);
}

template <class T>
void store_rows_as(const tinykv::Partial& partial, int rows, int dim, const float* sinks, const RowsView& to) {
  const int stride = tinykv::padded(dim), whole = dim / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const float* row = partial.out + (size_t)r * stride;
    T* out = (T*)to.data + (r % to.heads) * to.head_stride + (r / to.heads) * to.token_stride;
    float sum_ = partial.sum[r], factor = 1;

    // A sink takes part in the softmax, but brings no value
    if (sinks != nullptr) {
      const float sink = sinks[r % to.heads] * kLog2e;
      const float max_ = partial.max[r] > sink ? partial.max[r] : sink;
      factor = max_ == kMinusInfinity ? 1.f : exp2(partial.max[r] - max_);
      sum_ = max_ == kMinusInfinity ? 0.f : sum_ * factor + exp2(sink - max_);
    }

    // Rows that saw nothing give zeros; NaN stays
    factor = sum_ == 0 ? 0.f : factor / sum_;
    for (int d = 0; d < whole; d += kLanes) store(out + d, load(row + d) * factor);
    if (kLanes > 8 && whole < dim) store_tail(out + whole, load(row + whole) * factor);
  }
}

void store_rows(const tinykv::Partial& partial, int rows, int dim, const float* sinks, const RowsView& to) {
  if (to.dtype == tinykv::Dtype::float32) store_rows_as<float>(partial, rows, dim, sinks, to);
  else if (to.dtype == tinykv::Dtype::bfloat16) store_rows_as<Bfloat16>(partial, rows, dim, sinks, to);
  else store_rows_as<Float16>(partial, rows, dim, sinks, to);
}

}  // namespace
