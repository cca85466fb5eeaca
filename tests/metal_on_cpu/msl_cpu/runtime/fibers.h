// One Metal thread is one fiber of the calling thread, so that a schedule can be chosen and repeated.
#pragma once
#include <cstddef>

namespace msl {

constexpr size_t STACK_BYTES = 128 << 10;

// Saves where this code is in *from and goes on at `to`.
extern "C" void msl_switch(void** from, void* to);

// What to switch to in order to call `start` on a fresh stack that ends at `top`.
void* fresh_fiber(char* top, void (*start)());

}  // namespace msl
