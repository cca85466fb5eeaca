#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <system_error>

namespace tinykv {
namespace {

std::atomic<ThreadPool*> current{nullptr};
std::atomic<int> wanted{0};

int processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  // The old pool of a forked child is left alone: its locks may have been held by threads that are gone.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  (void)registered;
  ThreadPool* pool = current.load();
  if (pool != nullptr) return *pool;
  auto* fresh = new ThreadPool;
  if (current.compare_exchange_strong(pool, fresh)) return *fresh;
  delete fresh;
  return *pool;
}

void ThreadPool::set_threads(int threads) {
  wanted.store(std::max(0, threads));
}

int ThreadPool::threads() {
  static const int available = processors();
  const int threads = wanted.load(std::memory_order_relaxed);
  return threads > 0 ? threads : available;
}

void ThreadPool::run_erased(int items, Call call, const void* body) {
  const int threads = std::min(items, ThreadPool::threads());
  std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
  if (threads <= 1 || !lock.try_lock()) {
    for (int item = 0; item < items; ++item) call(body, item);
    return;
  }
  start_workers(threads - 1);

  // Open the gate and wake sleepers
  call_ = call;
  body_ = body;
  items_ = items;
  most_.store(threads - 1, std::memory_order_relaxed);
  next_.store(0, std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  jobs_.fetch_add(1, std::memory_order_release);
  if (threads - 1 >= workers_) {
    jobs_.notify_all();
  } else {
    for (int i = 1; i < threads; ++i) jobs_.notify_one();
  }

  take_items();

  // Close the gate, and wait for those who came in: they are busy with their last item
  uint32_t inside = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  for (int turn = 0; inside != 0; ++turn) {
    if (turn < 2000) relax();
    else gate_.wait(inside, std::memory_order_acquire);
    inside = gate_.load(std::memory_order_acquire);
  }
}

void ThreadPool::start_workers(int count) {
  if (workers_ >= count) return;
  // Signals belong to the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (; workers_ < count; ++workers_) std::thread([this] { work_forever(); }).detach();
  } catch (const std::system_error&) {
    // No more threads to be had: those there are do the work.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ThreadPool::work_forever() {
  for (uint32_t seen = 0;;) {
    if (join()) {
      take_items();
      leave();
    }
    jobs_.wait(seen, std::memory_order_acquire);
    seen = jobs_.load(std::memory_order_acquire);
  }
}

bool ThreadPool::join() {
  uint32_t gate = gate_.load(std::memory_order_acquire);
  while ((gate & kOpen) != 0 && (gate & ~kOpen) < most_.load(std::memory_order_relaxed))
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
  return false;
}

void ThreadPool::leave() {
  if (gate_.fetch_sub(1, std::memory_order_acq_rel) == 1) gate_.notify_all();
}

void ThreadPool::take_items() {
  for (int item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) call_(body_, item);
}

}  // namespace tinykv
