#include "fibers.h"

#include <cstdint>

namespace msl {

#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch, .-msl_switch
)");
constexpr int SAVED = 6, RETURN = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl msl_switch
.type msl_switch,@function
msl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size msl_switch, .-msl_switch
)");
constexpr int SAVED = 20, RETURN = 11;
#else
#error "msl_switch is written for x86-64 and arm64"
#endif

void* fresh_fiber(char* top, void (*start)()) {
  uint64_t* frame = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
  *--frame = 0;  // x86-64: a function is entered with the stack 8 bytes off a multiple of 16
#if defined(__x86_64__)
  *--frame = reinterpret_cast<uint64_t>(start);
  for (int i = 0; i < SAVED; i++) *--frame = 0;
#else
  *--frame = 0;
  frame -= SAVED;
  for (int i = 0; i < SAVED; i++) frame[i] = 0;
  frame[RETURN] = reinterpret_cast<uint64_t>(start);
#endif
  return frame;
}

}  // namespace msl
