#include "pool_array.h"

#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "mlx/allocator.h"
#include "pool_memory.h"

namespace tinykv {
namespace {

size_t machine_bytes() {
  return size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
}

// `memory` as a buffer of mlx's allocator, which frees it at the end.
mx::allocator::Data as_data(void* memory, size_t bytes) {
  // Metal wraps memory that begins at a system page's border.
  mx::allocator::Buffer wrapped = mx::allocator::make_buffer(memory, bytes);
  if (wrapped.ptr() != nullptr)
    return {wrapped, [memory](mx::allocator::Buffer buffer) {
              mx::allocator::release(buffer);
              release_pool(memory);
            }};
  // The allocator of mlx for CPUs keeps a buffer's size in front of it and has no way to wrap other memory.
  auto* size = static_cast<size_t*>(memory) - 1;
  *size = bytes;
  mx::allocator::Buffer buffer(size);
  if (buffer.raw_ptr() != memory || mx::allocator::allocator().size(buffer) != bytes) {
    release_pool(memory);
    throw std::runtime_error("this mlx keeps its buffers in another way than the one tinykv-native was built for");
  }
  return {buffer, [memory](mx::allocator::Buffer) { release_pool(memory); }};
}

mx::array over(mx::array::Data data, mx::Shape shape, mx::Dtype dtype) {
  mx::array array(std::move(shape), dtype, nullptr, {});
  array.set_data(std::move(data));
  array.set_status(mx::array::Status::available);
  return array;
}

// `pool` with another number of pages, over the same memory.
mx::array with_shape(const mx::array& pool, mx::Shape shape) {
  mx::array array(std::move(shape), pool.dtype(), nullptr, {});
  array.copy_shared_buffer(pool, array.strides(), {true, true, array.size() <= 1}, array.size());
  array.set_status(mx::array::Status::available);
  return array;
}

}  // namespace

mx::array resize_pages(const std::optional<mx::array>& pool, mx::Shape shape, mx::Dtype dtype, int64_t reserve) {
  for (auto length : shape)
    if (shape.size() != 4 || length < 1) throw std::invalid_argument("pages need four axes of at least one");
  mx::array wanted(shape, dtype, nullptr, {});
  const size_t bytes = wanted.nbytes(), page_bytes = bytes / shape[0];
  if (pool) {
    if (pool->dtype() != dtype || !std::equal(shape.begin() + 1, shape.end(), pool->shape().begin() + 1))
      throw std::invalid_argument("pages keep their dtype and all but the first axis when they are resized");
    if (resize_pool(const_cast<char*>(pool->data<char>()), bytes)) return with_shape(*pool, std::move(shape));
  }
  const size_t capacity = reserve > 0 ? size_t(reserve) * page_bytes : machine_bytes();
  void* memory = reserve_pool(bytes, capacity);
  mx::array fresh = over(as_data(memory, bytes), std::move(shape), dtype);
  if (pool) std::memcpy(memory, pool->data<char>(), std::min(bytes, pool->nbytes()));
  return fresh;
}

bool fits(const mx::array& pool, int64_t num_pages) {
  return num_pages * (pool.nbytes() / pool.shape(0)) <= pool_capacity(pool.data<char>());
}

}  // namespace tinykv
