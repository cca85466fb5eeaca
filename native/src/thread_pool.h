#pragma once
// Threads that share the items of one job. Idle threads sleep; a job that is done before a thread wakes up doesn't
// wait for it, so starting work costs the caller one system call.
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace tinykv {

class ThreadPool {
 public:
  // The process's pool. A forked child gets a new one: threads don't survive a fork.
  static ThreadPool& instance();

  // Most threads that work at once, the caller included; 0 for one per processor this process may use.
  static void set_threads(int threads);
  static int threads();

  // Calls body(item) for every item of [0, items), on the calling thread and others; returns when all are done. Items
  // are handed out in order. `body` must not throw. Runs on the calling thread alone while another job has the pool.
  template <class Body>
  void run(int items, const Body& body) {
    run_erased(items, [](const void* self, int item) { (*static_cast<const Body*>(self))(item); }, &body);
  }

 private:
  using Call = void (*)(const void* body, int item);

  void run_erased(int items, Call call, const void* body);
  void start_workers(int count);
  void work_forever();
  bool join();
  void leave();
  void take_items();

  std::mutex busy_;  // held by the thread whose job has the pool
  int workers_ = 0;

  // The job, published by opening the gate
  Call call_ = nullptr;
  const void* body_ = nullptr;
  int items_ = 0;
  std::atomic<uint32_t> most_{0};  // workers that may join
  std::atomic<int> next_{0};

  // Whether workers may join (kOpen) and how many have
  static constexpr uint32_t kOpen = 1u << 31;
  std::atomic<uint32_t> gate_{0};
  std::atomic<uint32_t> jobs_{0};  // counts up at each job; idle workers sleep on it
};

}  // namespace tinykv
