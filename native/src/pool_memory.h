#pragma once
// Address space for page arrays: reserved once, usable up to what was asked for, given memory by the system only when
// it is written. So an array grows in place, with nothing copied.
#include <cstddef>

namespace tinykv {

// Reserves address space and makes the first `bytes` usable; `capacity` is the most it can be grown to. Where the
// system doesn't have that much address space the capacity gets smaller, but never below `bytes`. The memory begins at
// a system page's border and is zero. Throws std::bad_alloc.
void* reserve_pool(size_t bytes, size_t capacity);

// Makes the first `bytes` of a reserved pool usable, and gives the memory of what was usable behind them back to the
// system. False if its capacity is smaller. Throws std::bad_alloc if the system refuses.
bool resize_pool(void* pool, size_t bytes);

// What a pool can be grown to; 0 for memory that isn't a pool.
size_t pool_capacity(const void* pool);

// Gives back a pool's address space and memory.
void release_pool(void* pool);

struct PoolBytes {
  size_t reserved;   // address space
  size_t usable;     // of that, what arrays cover
  size_t committed;  // of that, what the system has given memory for
};
// Of all pools of the process.
PoolBytes pool_bytes();

}  // namespace tinykv
