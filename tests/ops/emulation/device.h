// Stands in for _cluster.cuh, to run a kernel's clusters on a CPU, one after another: a thread for every thread of a
// cluster. Macros: THREADS of a block, CLUSTER (1 unless defined).

#include <algorithm>
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
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

constexpr int WARPS = THREADS / 32, HEAD_DIM = 128, SHARED_BYTES = 227 * 1024;
constexpr float LOW = -3e38f, LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

inline int __float2int_rn(float x) { return (int)nearbyintf(x); }

struct Warp {
  std::barrier<> barrier{32};
  u32 words[2][32][6];                                    // of one exchange, and of the next
};

struct Block {
  std::barrier<> barrier{THREADS};
  Warp warps[WARPS];
  alignas(128) u8 shared[SHARED_BYTES];
};

struct Cluster {
  std::barrier<> barrier{CLUSTER * THREADS};
  std::mutex mutex;                                       // of the blocks' barriers in shared memory
  std::condition_variable changed;
  Block blocks[CLUSTER];
};

static Cluster* cluster;
static thread_local Block* block;
static thread_local int own_thread, own_block_x, own_block_y, grid_x, exchange;
static thread_local std::optional<std::barrier<>::arrival_token> arrived;

DEVICE int thread_index() { return own_thread; }
DEVICE int block_x() { return own_block_x; }
DEVICE int block_y() { return own_block_y; }
DEVICE int blocks_x() { return grid_x; }
DEVICE int cluster_rank() { return own_block_x % CLUSTER; }
DEVICE u8* dynamic_shared() { return block->shared; }
DEVICE void sync_block() { block->barrier.arrive_and_wait(); }
DEVICE void sync_warp() { block->warps[own_thread / 32].barrier.arrive_and_wait(); }
DEVICE void arrive_cluster() { arrived = cluster->barrier.arrive(); }
DEVICE void wait_cluster() { cluster->barrier.wait(std::move(*arrived)); }
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
  Warp& warp = block->warps[own_thread / 32];
  auto& all = warp.words[exchange ^= 1];
  memcpy(all[own_thread % 32], words, sizeof(words));
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
static Number shuffle_xor(Number value, int mask) { return shuffle(value, own_thread % 32 ^ mask); }
template <class Number>
static Number shuffle_up(Number value, int distance) {
  const int lane = own_thread % 32;
  return shuffle(value, lane < distance ? lane : lane - distance);
}

// ---- products: lane 4 g + t has rows g and g + 8 of A, column g of B, and rows g and g + 8 of columns 2 t, 2 t + 1 of c

// c[4] += A B, with words t and t + 4 of the rows of A, the word before the row, and of the column of B.
template <class Number, class Multiply>
static void multiply(Number (&c)[4], const u32 (&words)[6], Multiply product) {
  in_warp(words, [&](auto& all) {
    const int g = own_thread % 32 / 4, t = own_thread % 4;
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
DEVICE void add_global(u64* address, u64 value) { __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
DEVICE void add_shared(u32* address) { __atomic_fetch_add(address, 1, __ATOMIC_RELAXED); }
DEVICE int take_place(int* next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }
DEVICE void set_bits(u32* words, u32 i, u32 bits) { __atomic_fetch_or(&words[i / 32], bits << i % 32, __ATOMIC_RELAXED); }

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
    cluster->changed.notify_all();
  }
  *barrier = bits_of<u64>(phase);
}

DEVICE void init_barrier(u64* barrier) { *barrier = 0; }
DEVICE void publish_barriers() {}
DEVICE void arm_barrier(u64* barrier, u32 bytes) {
  const std::lock_guard lock(cluster->mutex);
  update_barrier(barrier, (int)bytes, 1);
}
DEVICE void wait_barrier(u64* barrier, int parity) {
  std::unique_lock lock(cluster->mutex);
  cluster->changed.wait(lock, [=] { return bits_of<Phase>(*barrier).ended % 2 != parity; });
}

template <class Value>
static void send(Value* to, int rank, Value value, u64* barrier) {
  u8* other = cluster->blocks[rank].shared;
  const std::lock_guard lock(cluster->mutex);
  memcpy(other + ((u8*)to - block->shared), &value, sizeof(value));
  update_barrier((u64*)(other + ((u8*)barrier - block->shared)), -(int)sizeof(value), 0);
}

template <class Kernel, class Arguments>
static void run_grid(Kernel kernel, const Arguments& arguments, int clusters_x, int blocks_y) {
  for (int y = 0; y < blocks_y; y++)
    for (int x = 0; x < clusters_x; x++) {
      const auto own = std::make_unique<Cluster>();
      cluster = own.get();
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < CLUSTER; rank++) {
        memset(cluster->blocks[rank].shared, 0xFF, SHARED_BYTES);            // NaN
        for (int i = 0; i < THREADS; i++)
          threads.emplace_back([=] {
            block = &cluster->blocks[rank];
            own_thread = i, own_block_x = x * CLUSTER + rank, own_block_y = y, grid_x = clusters_x * CLUSTER;
            kernel(arguments);
          });
      }
    }
}
