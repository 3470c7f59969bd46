// Stands in for _cluster.cuh, to run a kernel's clusters on a CPU, one after another. The threads of a cluster take turns
// on one thread of the CPU: each runs until it has to wait for others. Every round has them in another order, and leaves
// out some warps, which fall behind. So a missing barrier shows, and shows again. Macros: THREADS of a block, CLUSTER (1
// unless defined).

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>

using std::max;
using std::min;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;

struct alignas(8) Words2 { u32 x[2]; };
struct alignas(16) Words4 { u32 x[4]; };

#define DEVICE inline
#define KERNEL(name) static void name
#define MARK(stage)

#ifndef CLUSTER
#define CLUSTER 1
#endif

constexpr int WARPS = THREADS / 32, HEAD_DIM = 128, SHARED_BYTES = 227 * 1024, STACK_BYTES = 256 * 1024;
constexpr float LOW = -3e38f, LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

inline int __float2int_rn(float x) { return (int)nearbyintf(x); }

// ---- threads that take turns

struct Block;
struct Warp;

struct Thread {
  int index, block_x, block_y;
  Block* block;
  Warp* warp;
  int exchange = 0;                                       // of the warp, even or odd
  unsigned arrived = 0;                                   // the phase of the cluster's barrier
  const unsigned* phase = nullptr;                        // what it waits for, as long as it is `seen`
  unsigned seen = 0;
  bool started = false, ended = false;
  jmp_buf place;
  std::unique_ptr<u8[]> stack{new u8[STACK_BYTES]};
};

static Thread* self;
static jmp_buf scheduler;
static std::function<void()> body;
static bool progress;                                     // since a round began

// ucontext starts a thread on its stack; from then on jumps are twenty times as fast as its switches.
static void start() {
  body();
  self->ended = progress = true;
  _longjmp(scheduler, 1);
}

static void resume(Thread& thread) {
  self = &thread;
  if (_setjmp(scheduler)) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get(), context.uc_stack.ss_size = STACK_BYTES, context.uc_link = nullptr;
  makecontext(&context, start, 0);
  setcontext(&context);
}

static void let_others_run() {
  if (!_setjmp(self->place)) _longjmp(scheduler, 1);
}

struct Meeting {
  int expected, missing = expected;
  unsigned phase = 0;

  explicit Meeting(int threads) : expected(threads) {}
  unsigned arrive() {
    const unsigned own = phase;
    progress = true;
    if (--missing == 0) missing = expected, phase++;
    return own;
  }
  void wait(unsigned own) {
    self->phase = &phase, self->seen = own;
    while (phase == own) let_others_run();
    self->phase = nullptr;
  }
  void arrive_and_wait() { wait(arrive()); }
};

struct Warp {
  Meeting barrier{32};
  int pause = 0;                                          // rounds in which its threads do not run
  u32 words[2][32][6];                                    // of one exchange, and of the next
};

struct Block {
  Meeting barrier{THREADS};
  Warp warps[WARPS];
  alignas(128) u8 shared[SHARED_BYTES];
};

struct Cluster {
  Meeting barrier{CLUSTER * THREADS};
  Block blocks[CLUSTER];
};

static Cluster* cluster;
static int grid_x;

DEVICE int thread_index() { return self->index; }
DEVICE int block_x() { return self->block_x; }
DEVICE int block_y() { return self->block_y; }
DEVICE int blocks_x() { return grid_x; }
DEVICE int cluster_rank() { return self->block_x % CLUSTER; }
DEVICE u8* dynamic_shared() { return self->block->shared; }
DEVICE void sync_block() { self->block->barrier.arrive_and_wait(); }
DEVICE void sync_warp() { self->warp->barrier.arrive_and_wait(); }
DEVICE void arrive_cluster() { self->arrived = cluster->barrier.arrive(); }
DEVICE void wait_cluster() { cluster->barrier.wait(self->arrived); }
DEVICE void wait_for_previous_kernel() {}
DEVICE void let_next_kernel_start() {}

template <class To, class From>
static To bits_of(From value) {
  To result;
  static_assert(sizeof(To) == sizeof(From));
  memcpy(&result, &value, sizeof(To));
  return result;
}

DEVICE float as_float(u32 bits) { return bits_of<float>(bits); }
DEVICE u32 as_bits(float value) { return bits_of<u32>(value); }
DEVICE int count_bits(u32 word) { return __builtin_popcount(word); }
DEVICE float half(u32 bits) { return (float)bits_of<_Float16>((u16)bits); }
DEVICE u32 half_bits(float value) { return bits_of<u16>((_Float16)value); }
DEVICE u32 to_finite_half2(float low, float high) {
  return half_bits(std::clamp(low, -65504.f, 65504.f)) | half_bits(std::clamp(high, -65504.f, 65504.f)) << 16;
}
DEVICE u32 to_half2_below_infinity(float low, float high) {
  return half_bits(min(low, 65504.f)) | half_bits(min(high, 65504.f)) << 16;
}
DEVICE u32 bf16_bits(float value) {
  const u32 bits = as_bits(value);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 to_bf16x2(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
  const u64 both = (u64)high << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; i++) result |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float log2_fast(float x) { return log2f(x); }

struct alignas(8) MaxSum { float max, sum; };

DEVICE MaxSum merge(MaxSum a, MaxSum b) {
  const float top = fmaxf(a.max, b.max);
  return MaxSum{top, a.sum * exp2_fast(a.max - top) + b.sum * exp2_fast(b.max - top)};
}

// Show a lane's words to its warp, and return what `read` makes of all lanes' words. None writes those of the exchange
// after the next before all have read these.
template <int COUNT, class Read>
static auto in_warp(const u32 (&words)[COUNT], Read read) {
  Warp& warp = *self->warp;
  auto& all = warp.words[self->exchange ^= 1];
  memcpy(all[self->index % 32], words, sizeof(words));
  warp.barrier.arrive_and_wait();
  return read(all);
}

template <class Add>
static u32 reduce_warp(u32 value, Add add) {
  return in_warp({value}, [=](auto& all) {
    u32 result = all[0][0];
    for (int lane = 1; lane < 32; lane++) result = add(result, all[lane][0], lane);
    return result;
  });
}

DEVICE u32 warp_ballot(bool predicate) {
  return reduce_warp(predicate, [](u32 bits, u32 bit, int lane) { return bits | bit << lane; });
}
DEVICE int warp_sum(int value) {
  return (int)reduce_warp((u32)value, [](u32 sum, u32 x, int) { return sum + x; });
}
DEVICE u32 warp_max(u32 value) {
  return reduce_warp(value, [](u32 most, u32 x, int) { return max(most, x); });
}

template <class Number>
static Number shuffle(Number value, int lane) {
  return in_warp({bits_of<u32>(value)}, [=](auto& all) { return bits_of<Number>(all[lane % 32][0]); });
}
template <class Number>
static Number shuffle_xor(Number value, int mask) { return shuffle(value, self->index % 32 ^ mask); }
template <class Number>
static Number shuffle_up(Number value, int distance) {
  const int lane = self->index % 32;
  return shuffle(value, lane < distance ? lane : lane - distance);
}

// ---- products: lane 4 g + t has rows g and g + 8 of A, column g of B, and rows g and g + 8 of columns 2 t, 2 t + 1 of c

// c[4] += A B, with words t and t + 4 of the rows of A, the word before the row, and of the column of B.
template <class Number, class Multiply>
static void multiply(Number (&c)[4], const u32 (&words)[6], Multiply product) {
  in_warp(words, [&](auto& all) {
    const int g = self->index % 32 / 4, t = self->index % 4;
    for (int i = 0; i < 4; i++)
      for (int word = 0; word < 8; word++) {
        const u32 of_row = all[4 * g + word % 4][i / 2 + word / 4 * 2];
        const u32 of_column = all[4 * (2 * t + i % 2) + word % 4][4 + word / 4];
        c[i] += product(of_row, of_column);
      }
    return 0;
  });
}

DEVICE void multiply_bits(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply(c, {a0, a1, a2, a3, b0, b1}, [](u32 row, u32 column) { return __builtin_popcount(row & column); });
}

template <class Column>
static int multiply_bytes(u32 row, u32 column) {
  int sum = 0;
  for (int i = 0; i < 32; i += 8) sum += (int)(s8)(row >> i) * (Column)(column >> i);
  return sum;
}
DEVICE void multiply_s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply(c, {a0, a1, a2, a3, b0, b1}, multiply_bytes<s8>);
}
DEVICE void multiply_s8u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply(c, {a0, a1, a2, a3, b0, b1}, multiply_bytes<u8>);
}
DEVICE void multiply_bf16(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
  multiply(c, {a0, 0, a2, 0, b0, b1}, [](u32 row, u32 column) {
    return as_float(row << 16) * as_float(column << 16) + as_float(row & 0xFFFF0000u) * as_float(column & 0xFFFF0000u);
  });
}

// ---- memory

template <int OFFSET>
DEVICE Words4 load16(const void* address, bool exists) {
  Words4 r = {};
  if (exists) memcpy(&r, (const u8*)address + OFFSET, 16);
  return r;
}
DEVICE void load4(u32& r, const void* address, bool exists) {
  if (exists) memcpy(&r, address, 4);
}
DEVICE void load8(float (&r)[2], const float* address, bool exists) {
  if (exists) memcpy(r, address, 8);
}

DEVICE int load_s8(const s8* address, bool exists) { return exists ? *address : 0; }
DEVICE void prefetch_l2(const void*, u32) {}
DEVICE void add_global(u64* address, u64 value) { *address += value; }
DEVICE void add_shared(u32* address) { ++*address; }
DEVICE int take_place(int* next) { return (*next)++; }
DEVICE void set_bits(u32* words, u32 i, u32 bits) { words[i / 32] |= bits << i % 32; }

// ---- barriers in shared memory, and stores to another block's

struct Phase {
  int missing;                                            // bytes
  u16 armed, ended;
};

static void update_barrier(u64* barrier, int missing, u16 armed) {
  Phase phase = bits_of<Phase>(*barrier);
  phase.missing += missing, phase.armed |= armed;
  if (phase.armed && phase.missing == 0) {
    phase.armed = 0, phase.ended++;
  }
  progress = true;
  *barrier = bits_of<u64>(phase);
}

DEVICE void init_barrier(u64* barrier) { *barrier = 0; }
DEVICE void publish_barriers() {}
DEVICE void arm_barrier(u64* barrier, u32 bytes) { update_barrier(barrier, (int)bytes, 1); }
DEVICE void wait_barrier(u64* barrier, int parity) {
  while (bits_of<Phase>(*barrier).ended % 2 == parity) let_others_run();
}

template <class Value>
static void send(Value* to, int rank, Value value, u64* barrier) {
  u8 *own = self->block->shared, *other = cluster->blocks[rank].shared;
  memcpy(other + ((u8*)to - own), &value, sizeof(value));
  update_barrier((u64*)(other + ((u8*)barrier - own)), -(int)sizeof(value), 0);
}

// Return how many threads of a cluster wait for each other, which ends the run; 0 if all have come to an end.
template <class Kernel, class Arguments>
static int run_grid(Kernel kernel, const Arguments& arguments, int clusters_x, int blocks_y) {
  const auto own = std::make_unique<Cluster>();
  std::vector<Thread> threads(CLUSTER * THREADS);
  std::vector<Thread*> running;
  std::mt19937 random;
  body = [&] { kernel(arguments); };
  cluster = own.get(), grid_x = clusters_x * CLUSTER;
  for (int y = 0; y < blocks_y; y++)
    for (int x = 0; x < clusters_x; x++) {
      for (int i = 0; i < CLUSTER * THREADS; i++) {
        Thread& thread = threads[i];
        const int rank = i / THREADS;
        thread.index = i % THREADS, thread.block_x = x * CLUSTER + rank, thread.block_y = y;
        thread.block = &cluster->blocks[rank], thread.warp = &thread.block->warps[thread.index / 32];
        thread.started = thread.ended = false;
        running.push_back(&thread);
      }
      for (Block& block : cluster->blocks) memset(block.shared, 0xFF, SHARED_BYTES);  // NaN
      while (!running.empty()) {
        std::shuffle(running.begin(), running.end(), random);
        progress = false;
        bool paused = false;
        for (Block& block : cluster->blocks)
          for (Warp& warp : block.warps)
            if (warp.pause > 0) warp.pause--, paused = true;
            else if (random() % 8 == 0) warp.pause = random() % 32, paused = true;
        for (Thread* thread : running) {
          const bool waits = thread->phase && *thread->phase == thread->seen;
          if (!waits && thread->warp->pause == 0) resume(*thread);
        }
        std::erase_if(running, [](Thread* thread) { return thread->ended; });
        if (!progress && !paused) return (int)running.size();
      }
    }
  return 0;
}
