#pragma once
// Page arrays as mlx arrays over reserved memory.
#include <optional>

#include "mlx/array.h"

namespace tinykv {

namespace mx = mlx::core;

// An array of `shape` for pages: `pool` grown or cut along its first axis, or a fresh one if there is none. What is in
// the first pages stays. Nothing is copied unless `pool` isn't one of ours or outgrows the address space it reserved,
// which is `reserve` pages, or as much as the machine has memory if that is 0. Throws std::bad_alloc.
mx::array resize_pages(const std::optional<mx::array>& pool, mx::Shape shape, mx::Dtype dtype, int64_t reserve);

// Whether `pool` can have `num_pages` pages without a copy.
bool fits(const mx::array& pool, int64_t num_pages);

}  // namespace tinykv
