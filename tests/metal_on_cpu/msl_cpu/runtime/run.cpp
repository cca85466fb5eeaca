// One dispatch: every thread of every threadgroup, with faults caught and reported.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace msl {

static struct sigaction old_actions[4];
static stack_t old_stack;
static const int FAULTS[4] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};

static void on_fault(int signal, siginfo_t* info, void*) {
  if (signal == SIGILL || signal == SIGTRAP) {
    Dl_info found;
    char place[400] = "";
    if (dladdr(info->si_addr, &found)) {
      snprintf(place, sizeof place, "@%s+0x%lx", found.dli_fname,
               (unsigned long)((char*)info->si_addr - (char*)found.dli_fbase));
    }
    say("UNDEFINED BEHAVIOUR (index, shift, overflow or alignment) by %s %s", where(current).c_str(), place);
    give_up();
  }
  const char* address = static_cast<const char*>(info->si_addr);
  const Buffer* nearest = nullptr;
  for (const Buffer& buffer : run.buffers) {
    const ptrdiff_t offset = address - buffer.data;
    if (offset >= -(ptrdiff_t(1) << 31) && offset < ptrdiff_t(buffer.bytes) + (ptrdiff_t(1) << 31)) nearest = &buffer;
  }
  say("OUT OF BOUNDS: buffer '%s' at byte %td of %zu by %s", nearest ? nearest->name : "?",
      nearest ? address - nearest->data : 0, nearest ? nearest->bytes : size_t(0), where(current).c_str());
  give_up();
}

void install_fault_handlers() {
  static char stack_memory[64 << 10];
  stack_t stack{};
  stack.ss_sp = stack_memory;
  stack.ss_size = sizeof stack_memory;
  sigaltstack(&stack, &old_stack);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 4; i++) sigaction(FAULTS[i], &action, &old_actions[i]);
}

void remove_fault_handlers() {
  for (int i = 0; i < 4; i++) sigaction(FAULTS[i], &old_actions[i], nullptr);
  sigaltstack(&old_stack, nullptr);
}

static void place_threads(const uint32_t group[3], const uint32_t groups[3], const uint32_t size[3],
                          const uint32_t grid[3]) {
  // The last threadgroup along an axis may be smaller.
  uint32_t here[3];
  for (int k = 0; k < 3; k++) here[k] = std::min(size[k], grid[k] - group[k] * size[k]);
  run.threads = int(here[0] * here[1] * here[2]);
  run.simdgroups = (run.threads + 31) / 32;
  run.arrived = run.finished = 0;
  run.group_epoch = run.device_epoch = 1;
  for (int i = 0; i < run.simdgroups; i++) {
    Simdgroup& simdgroup = simdgroups[i];
    simdgroup.lanes = std::min(32, run.threads - 32 * i);
    simdgroup.arrived = 0;
    simdgroup.phase = 0;
    simdgroup.epoch = 1;
    simdgroup.finished = false;
  }
  for (int i = 0; i < run.threads; i++) {
    Thread& thread = threads[i];
    Position& p = thread.position;
    const uint32_t in_group[3] = {i % here[0], i / here[0] % here[1], i / (here[0] * here[1])};
    for (int k = 0; k < 3; k++) {
      p.thread_in_group[k] = in_group[k];
      p.group_in_grid[k] = group[k];
      p.thread_in_grid[k] = group[k] * size[k] + in_group[k];
      p.grid[k] = grid[k];
      p.groups[k] = groups[k];
      p.group_size[k] = here[k];
    }
    p.thread_index = i;
    p.lane = i % 32;
    p.simdgroup = i / 32;
    p.simdgroups = run.simdgroups;
    thread.index = i;
    thread.state = State::ready;
    thread.simdgroup = &simdgroups[i / 32];
    thread.simdgroup->lane[i % 32] = &thread;
    thread.stack = stacks + STACK_BYTES * i;
    // Stacks begin at different places in the processor's caches.
    thread.stack_pointer = fresh_fiber(thread.stack + STACK_BYTES - 64 - i * 17 % 61 * 64, fiber_start);
  }
}

}  // namespace msl

using namespace msl;

struct Call {
  void (*entry)(void**);
  void** arguments;
  int count;
  Buffer* buffers;
  uint32_t grid[3], threadgroup[3];
  uint32_t schedule;
};

struct Counts {
  uint64_t meetings, threadgroup_bytes, threadgroups;
};

// Returns the number of problems; `text` says which.
extern "C" int msl_run(Call* call, char* text, size_t room, Counts* counts) {
  run = Run{};
  run.entry = call->entry;
  run.arguments = call->arguments;
  run.schedule = call->schedule;
  run.buffers.assign(call->buffers, call->buffers + call->count);
  uint32_t size[3], groups[3];
  for (int k = 0; k < 3; k++) {
    size[k] = std::min(call->threadgroup[k], call->grid[k]);  // as mlx does
    groups[k] = (call->grid[k] + size[k] - 1) / size[k];
  }
  if (size_t(size[0]) * size[1] * size[2] > MOST_THREADS) {
    snprintf(text, room, "THREADGROUP of more than 1024 threads");
    return 1;
  }
  if (stacks == nullptr) {
    void* memory = mmap(nullptr, STACK_BYTES * MOST_THREADS, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return snprintf(text, room, "no memory for stacks"), 1;
    stacks = static_cast<char*>(memory);
  }
  memset(arena, 0xff, sizeof arena);
  check_begin_run();
  install_fault_handlers();
  const uint32_t total = groups[0] * groups[1] * groups[2];
  for (uint32_t i = 0; i < total && !run.failed; i++) {
    const uint32_t index = run.schedule & 1 ? total - 1 - i : i;
    const uint32_t group[3] = {index % groups[0], index / groups[0] % groups[1], index / (groups[0] * groups[1])};
    run.group = index + 1;
    place_threads(group, groups, size, call->grid);
    memset(arena, 0xff, run.arena_top);  // what nobody wrote is NaN
    check_begin_group();
    current = &threads[run.schedule & 1 ? run.threads - 1 : 0];
    check_pause(false);
    msl_switch(&main_stack, current->stack_pointer);
    check_pause(true);
  }
  remove_fault_handlers();
  if (!run.failed) check_end_run();
  std::copy(run.buffers.begin(), run.buffers.end(), call->buffers);
  snprintf(text, room, "%s", run.report.c_str());
  *counts = {run.meetings, run.threadgroup_bytes, total};
  return run.problems;
}
