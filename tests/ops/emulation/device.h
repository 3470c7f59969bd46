// Stands in for _cluster.cuh, to run a kernel of one block after another on a CPU: a thread for every thread of a block.
// Functions of a warp exchange values through memory, between two barriers. Macro: THREADS of a block.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using std::max;
using std::min;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;

#define DEVICE static inline
#define KERNEL(name) static void name

constexpr int WARPS = THREADS / 32, HEAD_DIM = 128, SHARED_BYTES = 1 << 16;
constexpr float LOW = -1e30f;

struct Warp {
  std::barrier<> barrier{32};
  u32 words[32][6];
};

struct Block {
  std::barrier<> barrier{THREADS};
  Warp warps[WARPS];
  alignas(128) u8 shared[SHARED_BYTES];
};

static Block* block;
static thread_local int own_thread, own_block_x, own_block_y, grid_x;

DEVICE int thread_index() { return own_thread; }
DEVICE int block_x() { return own_block_x; }
DEVICE int block_y() { return own_block_y; }
DEVICE int blocks_x() { return grid_x; }
DEVICE u8* dynamic_shared() { return block->shared; }
DEVICE void sync_block() { block->barrier.arrive_and_wait(); }
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
DEVICE float half(u32 bits) { return (float)bits_of<_Float16>((u16)bits); }
DEVICE u32 half_bits(float value) { return bits_of<u16>((_Float16)value); }
DEVICE u32 to_finite_half2(float low, float high) {
  return half_bits(std::clamp(low, -65504.f, 65504.f)) | half_bits(std::clamp(high, -65504.f, 65504.f)) << 16;
}
DEVICE u32 to_half2_below_infinity(float low, float high) {
  return half_bits(min(low, 65504.f)) | half_bits(min(high, 65504.f)) << 16;
}
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float log2_fast(float x) { return log2f(x); }

struct MaxSum { float max, sum; };

DEVICE MaxSum merge(MaxSum a, MaxSum b) {
  const float top = fmaxf(a.max, b.max);
  return MaxSum{top, a.sum * exp2_fast(a.max - top) + b.sum * exp2_fast(b.max - top)};
}

// Show a lane's words to its warp, and return what `read` makes of all lanes' words.
template <int COUNT, class Read>
static auto in_warp(const u32 (&words)[COUNT], Read read) {
  Warp& warp = block->warps[own_thread / 32];
  memcpy(warp.words[own_thread % 32], words, sizeof(words));
  warp.barrier.arrive_and_wait();
  const auto result = read(warp.words);
  warp.barrier.arrive_and_wait();
  return result;
}

DEVICE u32 warp_ballot(bool predicate) {
  return in_warp({(u32)predicate}, [](auto& all) {
    u32 bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= all[lane][0] << lane;
    return bits;
  });
}

DEVICE int warp_sum(int value) {
  return in_warp({(u32)value}, [](auto& all) {
    u32 sum = 0;
    for (int lane = 0; lane < 32; lane++) sum += all[lane][0];
    return (int)sum;
  });
}

template <class Number>
static Number shuffle_xor(Number value, int mask) {
  return in_warp({bits_of<u32>(value)}, [=](auto& all) { return bits_of<Number>(all[own_thread % 32 ^ mask][0]); });
}

// c[4] += A B with A 16 x 256 and B 256 x 8 of bits. Lane 4 g + t has words t and t + 4 of rows g and g + 8 of A, the
// word before the row, and of column g of B; and rows g and g + 8 of columns 2 t and 2 t + 1 of c.
DEVICE void multiply_bits(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  in_warp({a0, a1, a2, a3, b0, b1}, [&](auto& all) {
    const int g = own_thread % 32 / 4, t = own_thread % 4;
    for (int i = 0; i < 4; i++)
      for (int word = 0; word < 8; word++) {
        const u32 of_row = all[4 * g + word % 4][i / 2 + word / 4 * 2];
        const u32 of_column = all[4 * (2 * t + i % 2) + word % 4][4 + word / 4];
        c[i] += __builtin_popcount(of_row & of_column);
      }
    return 0;
  });
}

DEVICE void load4(u32& r, const void* address, bool exists) {
  if (exists) memcpy(&r, address, 4);
}
DEVICE void load8(float (&r)[2], const float* address, bool exists) {
  if (exists) memcpy(r, address, 8);
}

template <class Kernel, class Arguments>
static void run_grid(Kernel kernel, const Arguments& arguments, int blocks_x, int blocks_y) {
  for (int y = 0; y < blocks_y; y++)
    for (int x = 0; x < blocks_x; x++) {
      const auto own = std::make_unique<Block>();
      block = own.get();
      memset(block->shared, 0xFF, SHARED_BYTES);           // NaN
      std::vector<std::jthread> threads;
      for (int i = 0; i < THREADS; i++)
        threads.emplace_back([=] {
          own_thread = i, own_block_x = x, own_block_y = y, grid_x = blocks_x;
          kernel(arguments);
        });
    }
}
