// Runs the threads of a block as contexts of one thread of the CPU, each until it waits: a run is
// the same every time, and a barrier costs no system's scheduler. From one wait to the next the
// threads run in opposite order, so that nothing may rely on who comes first.
//
// This file is never compiled for ThreadSanitizer, which sees the accesses of the kernels alone;
// where it is linked, the switches tell it that only barriers put accesses in order.
#include "cuda_on_cpu.h"

#include <ucontext.h>

#include <map>
#include <memory>

extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
}

int bulk_copies = 1;
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

constexpr int kMostShared = 227 * 1024, kGuard = 1024;  // bytes

extern "C" {
// Hidden: the kernels address it as an array of their own file.
__attribute__((visibility("hidden"),
               aligned(1024))) unsigned char cuda_on_cpu_shared[kMostShared + kGuard];
}

namespace cuda_on_cpu {
namespace {

constexpr int kMostThreads = 1024, kStack = 256 * 1024;

enum class State { kReady, kAtBlock, kAtTeam, kAtWarp, kAtPhase, kDone };

struct Thread {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  void* fiber;
  State state;
  int barriers, team_barriers, exchanges;  // that it passed
  int first, last;                         // at kAtTeam: the threads of the team
  const uint64_t* bytes;  // at kAtPhase: the barrier and the phase that it waits for
  int phase;
  bool ordered;  // behind the previous grid
  const char* instruction[2];
  std::vector<Copy> copies;
  std::vector<Store> stores;
};

// Where bulk copies arrive.
struct Barrier {
  int armed, ended;        // phases
  int expected, arriving;  // bytes of the phase under way
  int count;
  Box boxes[16];
};

std::vector<Thread> threads(kMostThreads);
std::map<const uint64_t*, Barrier> byte_barriers;
unsigned char published[kMostShared];
// What the previous grid has yet to write.
struct {
  void* to;
  const void* from;
  int64_t bytes;
} late;
int shared_size;
bool starts_early;
ucontext_t scheduler;
void* scheduler_fiber;
// Addresses that ThreadSanitizer knows points by. Barriers have two in turn: a thread may be at the
// next before another departs.
char start_of_block, end_of_block, barriers[2];
const char* what_went_wrong;
const std::function<void()>* body;

int thread_index() { return int(threadIdx.y * blockDim.x + threadIdx.x); }
Thread& current() { return threads[thread_index()]; }

// A switch puts nothing in order; what precedes an arrival at a point precedes all departures.
void tell_switch(void* fiber) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(fiber, 1);
}
void tell_arrival(char* point) {
  if (__tsan_release) __tsan_release(point);
}
void tell_departure(char* point) {
  if (__tsan_acquire) __tsan_acquire(point);
}

void yield(State state) {
  Thread& t = current();
  t.state = state;
  tell_switch(scheduler_fiber);
  swapcontext(&t.context, &scheduler);
}

void run_thread() {
  tell_departure(&start_of_block);
  (*body)();
  if (!current().ordered) fault("a thread has not waited for the previous grid");
  if (!current().stores.empty()) fault("a thread returns before its boxes were read");
  tell_arrival(&end_of_block);
  yield(State::kDone);
}

void start_thread(int n) {
  Thread& t = threads[n];
  if (!t.stack) {
    t.stack.reset(new unsigned char[kStack]);
    if (__tsan_create_fiber) t.fiber = __tsan_create_fiber(0);
  }
  getcontext(&t.context);
  t.context.uc_stack.ss_sp = t.stack.get();
  t.context.uc_stack.ss_size = kStack;
  t.context.uc_link = nullptr;
  makecontext(&t.context, run_thread, 0);
  t.state = State::kReady;
  t.ordered = !starts_early;
  t.barriers = t.team_barriers = t.exchanges = 0;
  t.copies.clear();
  t.stores.clear();
}

void resume(int n) {
  threadIdx.x = unsigned(n) % blockDim.x, threadIdx.y = unsigned(n) / blockDim.x;
  tell_switch(threads[n].fiber);
  swapcontext(&scheduler, &threads[n].context);
}

void end_previous_grid() {
  if (late.bytes > 0) std::memcpy(late.to, late.from, size_t(late.bytes));
  late = {};
}

// Readies the threads first .. last - 1 if all that have not returned are at their barrier. That of
// a team waits for those that have, too.
bool release(int first, int last, State barrier) {
  int waiting = 0;
  for (int n = first; n < last; ++n) {
    const bool gone = threads[n].state == State::kDone && barrier != State::kAtTeam;
    if (!gone && threads[n].state != barrier) return false;
    waiting += threads[n].state == barrier;
  }
  for (int n = first; n < last; ++n) {
    if (threads[n].state == barrier) threads[n].state = State::kReady;
  }
  return waiting > 0;
}

// Readies the threads that wait for a phase which has been armed since.
bool release_armed(int count) {
  bool any = false;
  for (int n = 0; n < count; ++n) {
    Thread& t = threads[n];
    if (t.state != State::kAtPhase || t.phase >= byte_barriers[t.bytes].armed) continue;
    t.state = State::kReady;
    any = true;
  }
  return any;
}

const char* run_block(int count) {
  std::memset(cuda_on_cpu_shared, kPoison, sizeof(cuda_on_cpu_shared));
  std::memset(published, kPoison, sizeof(published));
  byte_barriers.clear();
  for (int n = 0; n < count; ++n) start_thread(n);
  tell_arrival(&start_of_block);
  for (int turn = 0;; ++turn) {
    for (int i = 0; i < count; ++i) {
      const int n = turn % 2 ? count - 1 - i : i;
      if (threads[n].state == State::kReady) resume(n);
      if (what_went_wrong) return what_went_wrong;
    }
    bool any = release(0, count, State::kAtBlock) | release_armed(count);
    for (int n = 0; n < count; n += 32) any |= release(n, n + 32, State::kAtWarp);
    for (int n = 0; n < count; ++n) {
      const Thread& t = threads[n];
      if (t.state == State::kAtTeam) any |= release(t.first, t.last, State::kAtTeam);
    }
    if (!any) break;
  }
  for (int n = 0; n < count; ++n) {
    if (threads[n].state == State::kAtPhase) return "a thread waits for a phase that is not armed";
    if (threads[n].state != State::kDone) return "threads wait at different barriers";
  }
  tell_departure(&end_of_block);
  for (const auto& [at, barrier] : byte_barriers) {
    if (barrier.armed > barrier.ended || barrier.count > 0)
      return "a block ends before its boxes have arrived";
  }
  const bool clean = std::all_of(cuda_on_cpu_shared + shared_size, std::end(cuda_on_cpu_shared),
                                 [](unsigned char byte) { return byte == kPoison; });
  return clean ? nullptr : "a thread wrote outside of the block's shared memory";
}

}  // namespace

void fault(const char* what) {
  what_went_wrong = what;
  yield(State::kDone);
  __builtin_unreachable();
}

void check_shared(const void* p, int bytes) {
  const int64_t at = static_cast<const unsigned char*>(p) - cuda_on_cpu_shared;
  if (at < 0 || at + bytes > shared_size) fault("access outside of the block's shared memory");
  if (at % bytes) fault("access to shared memory not aligned");
}

std::vector<Copy>& copies_of_this_thread() { return current().copies; }

std::vector<Store>& stores_of_this_thread() { return current().stores; }

Box make_box(const void* shared, const wtconv::cuda::BoxMap& map, int b, int c, int y, int x) {
  Box box{{}, b, c, y, x, const_cast<unsigned char*>(static_cast<const unsigned char*>(shared))};
  BoxTensor& tensor = box.tensor;
  std::memcpy(&tensor, map.words, sizeof(tensor));
  const int64_t at = box.shared - cuda_on_cpu_shared;
  if (at < 0 || at + tensor.bytes() > shared_size)
    fault("a box lies outside of the block's shared memory");
  if (at % (tensor.shape.swizzled ? 1024 : 128)) fault("a box is not aligned in shared memory");
  if (x * tensor.element_bytes % 16) fault("the columns of a box are not aligned in memory");
  if (b < 0 || b >= tensor.batch || c < 0 || c >= tensor.channels) fault("a box of no plane");
  return box;
}

// No memcpy and memcmp, which ThreadSanitizer sees.
void publish_shared() {
  const volatile unsigned char* from = cuda_on_cpu_shared;
  for (int i = 0; i < shared_size; ++i) published[i] = from[i];
}

bool is_published(const void* p, int bytes) {
  const volatile unsigned char* from = static_cast<const unsigned char*>(p);
  const unsigned char* seen = published + (from - cuda_on_cpu_shared);
  for (int i = 0; i < bytes; ++i) {
    if (from[i] != seen[i]) return false;
  }
  return true;
}

void start_barrier(const uint64_t* barrier) { byte_barriers[barrier] = {}; }

void arm_barrier(const uint64_t* barrier, int bytes) {
  Barrier& at = byte_barriers[barrier];
  if (at.armed > at.ended) fault("a phase is armed before the last one was waited for");
  ++at.armed;
  at.expected = bytes;
}

void add_to_phase(const uint64_t* barrier, const Box& box) {
  Barrier& at = byte_barriers[barrier];
  if (at.count == int(std::size(at.boxes))) fault("more boxes of a phase than foreseen");
  at.boxes[at.count++] = box;
  at.arriving += box.tensor.bytes();
}

std::span<const Box> end_phase(const uint64_t* barrier, int phase) {
  Barrier& at = byte_barriers[barrier];
  if (phase >= at.armed) {  // yet
    current().bytes = barrier, current().phase = phase;
    yield(State::kAtPhase);
  }
  if (phase < at.armed - 1) fault("a phase is waited for out of turn");
  if (at.ended == at.armed) return {};
  if (at.arriving != at.expected) fault("other bytes arrive than are expected");
  ++at.ended;
  const int count = at.count;
  at.count = at.arriving = 0;
  return {at.boxes, size_t(count)};
}

// Two sets of operands: a lane may be at the next instruction while another still reads.
const Operands* exchange(const char* instruction, const Operands& mine) {
  static Operands all[2][kMostThreads];
  Thread& t = current();
  const int set = t.exchanges++ % 2, first = thread_index() / 32 * 32;
  all[set][thread_index()] = mine;
  t.instruction[set] = instruction;
  yield(State::kAtWarp);
  for (int n = first; n < first + 32; ++n) {
    const Thread& other = threads[n];
    if (other.exchanges < t.exchanges || std::strcmp(other.instruction[set], instruction) != 0)
      fault("the lanes of a warp are not at the same instruction");
  }
  return all[set] + first;
}

const char* run_grid(int64_t blocks, dim3 threads_of_block, int shared_bytes, bool early,
                     const std::function<void()>& kernel) {
  const int count = int(threads_of_block.x * threads_of_block.y);
  if (threads_of_block.x % 32 || count > kMostThreads || shared_bytes > kMostShared)
    return "no GPU holds such a block";
  blockDim = threads_of_block, gridDim = dim3(unsigned(blocks));
  shared_size = shared_bytes, starts_early = early;
  if (!early) end_previous_grid();
  body = &kernel;
  what_went_wrong = nullptr;
  if (__tsan_get_current_fiber) scheduler_fiber = __tsan_get_current_fiber();
  for (int64_t block = 0; block < blocks; ++block) {
    blockIdx.x = unsigned(block);
    if (const char* error = run_block(count)) return error;
  }
  return nullptr;
}

}  // namespace cuda_on_cpu

void __syncthreads() {
  using namespace cuda_on_cpu;
  char* barrier = &barriers[current().barriers++ % 2];
  tell_arrival(barrier);
  yield(State::kAtBlock);
  tell_departure(barrier);
}

void cuda_on_cpu::sync_team(int team, int size) {
  static char points[15][2];  // as for barriers
  Thread& t = current();
  t.first = team * size, t.last = t.first + size;
  if (team < 0 || team >= 15 || thread_index() < t.first || thread_index() >= t.last)
    fault("a thread waits for a team that is not its own");
  if (t.last > int(blockDim.x * blockDim.y)) fault("a team reaches past its block");
  char* point = &points[team][t.team_barriers++ % 2];
  tell_arrival(point);
  yield(State::kAtTeam);
  tell_departure(point);
}

void __syncwarp() {
  using namespace cuda_on_cpu;
  static char points[kMostThreads / 32][2];  // as for barriers
  char* point = &points[thread_index() / 32][current().exchanges % 2];
  tell_arrival(point);
  exchange("syncwarp", {});
  tell_departure(point);
}

void wtconv::cuda::let_next_grid_start() {
  if (!cuda_on_cpu::current().ordered)
    cuda_on_cpu::fault("a thread lets the next grid start before it has waited");
}
void wtconv::cuda::wait_for_previous_grid() {
  cuda_on_cpu::end_previous_grid();
  cuda_on_cpu::current().ordered = true;
}

extern "C" void write_late(void* to, const void* from, int64_t bytes) {
  cuda_on_cpu::late = {to, from, bytes};
}
