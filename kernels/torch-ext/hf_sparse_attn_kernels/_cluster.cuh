// Device functions of kernels in CUDA C++ (compute capability 9.0 and later): loads, products on the tensor cores,
// distributed shared memory of thread-block clusters, and programmatic dependent launch. Needs no header, so NVRTC
// compiles it alone. Macros: THREADS of a block, BLOCKS that a multiprocessor has registers for.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;

struct alignas(8) Words2 { u32 x[2]; };
struct alignas(16) Words4 { u32 x[4]; };

#define DEVICE __device__ __forceinline__

constexpr int WARPS = THREADS / 32, HEAD_DIM = 128;

// ---- threads

DEVICE int thread_index() { return (int)threadIdx.x; }
DEVICE int block_x() { return (int)blockIdx.x; }
DEVICE int block_y() { return (int)blockIdx.y; }
DEVICE int blocks_x() { return (int)gridDim.x; }

DEVICE int cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return (int)rank;
}

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE u32 warp_ballot(bool predicate) { return __ballot_sync(~0u, predicate); }
DEVICE int warp_sum(int value) { return __reduce_add_sync(~0u, value); }
DEVICE u32 warp_max(u32 value) { return __reduce_max_sync(~0u, value); }
DEVICE int shuffle(int value, int lane) { return __shfl_sync(~0u, value, lane); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE int shuffle_xor(int value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE u32 shuffle_xor(u32 value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE float shuffle(float value, int lane) { return __shfl_sync(~0u, value, lane); }
DEVICE int shuffle_up(int value, int distance) { return __shfl_up_sync(~0u, value, distance); }
DEVICE float shuffle_up(float value, int distance) { return __shfl_up_sync(~0u, value, distance); }

// ---- numbers

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float value) { return __float_as_uint(value); }
DEVICE int count_bits(u32 word) { return __popc(word); }

DEVICE float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

DEVICE float log2_fast(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

DEVICE u32 to_bf16x2(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Two numbers as float16, the low one first: limited to the finite range, or at most its greatest and -inf below its least.
DEVICE u32 to_finite_half2(float low, float high) {
  u32 result;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

DEVICE u32 to_half2_below_infinity(float low, float high) {
  u32 result;
  asm("{ .reg .b32 t; cvt.rn.f16x2.f32 t, %1, %2; min.f16x2 %0, t, %3; }" : "=r"(result) : "f"(high), "f"(low), "r"(0x7BFF7BFF));
  return result;
}

DEVICE float half(u32 bits) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"((u16)bits));
  return result;
}

DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// ---- exponentials with base 2

constexpr float LOW = -3e38f, LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct alignas(8) MaxSum { float max, sum; };             // of exponentials, relative to the maximum

DEVICE MaxSum merge(MaxSum a, MaxSum b) {
  const float top = fmaxf(a.max, b.max);
  return MaxSum{top, a.sum * exp2_fast(a.max - top) + b.sum * exp2_fast(b.max - top)};
}

// ---- products on the tensor cores

// c[4] += A B with A 16 x 32 of s8, B 32 x 8 of u8.
DEVICE void multiply_s8u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c[4] += A B with A 16 x 32 and B 32 x 8 of s8.
DEVICE void multiply_s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c[4] += A B with A 16 x 256 and B 256 x 8 of bits.
DEVICE void multiply_bits(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c[4] += A B with A 16 x 16 and B 16 x 8 of bf16; rows 8 to 15 of A are zeros.
DEVICE void multiply_bf16(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

// ---- global memory

// 16 bytes at an offset, zeros without `exists`. The predicate is in the instruction: a branch would wait for every load.
template <int OFFSET>
DEVICE Words4 load16(const void* address, bool exists) {
  Words4 r;
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
      "  mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
      "  @p ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4 + %6]; }"
      : "=&r"(r.x[0]), "=&r"(r.x[1]), "=&r"(r.x[2]), "=&r"(r.x[3])
      : "l"(address), "r"((u32)exists), "n"(OFFSET)
      : "memory");
  return r;
}

// 4 bytes, or 8; without `exists` what was there stays.
DEVICE void load4(u32& r, const void* address, bool exists) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.L1::no_allocate.L2::128B.u32 %0, [%1]; }"
               : "+r"(r)
               : "l"(address), "r"((u32)exists)
               : "memory");
}

DEVICE void load8(float (&r)[2], const float* address, bool exists) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.L1::no_allocate.L2::128B.v2.f32 {%0, %1}, [%2]; }"
               : "+f"(r[0]), "+f"(r[1])
               : "l"(address), "r"((u32)exists)
               : "memory");
}

DEVICE int load_s8(const s8* address, bool exists) {
  int r;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.s32 %0, 0; @p ld.global.s8 %0, [%1]; }"
               : "=&r"(r)
               : "l"(address), "r"((u32)exists)
               : "memory");
  return r;
}

// Bytes, a multiple of 16, to the L2 cache.
DEVICE void prefetch_l2(const void* address, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

DEVICE void add_global(u64* address, u64 value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

DEVICE void add_shared(u32* address) { atomicAdd(address, 1u); }
DEVICE int take_place(int* next) { return atomicAdd(next, 1); }
// Bits from the i-th on, all in one word.
DEVICE void set_bits(u32* words, u32 i, u32 bits) { atomicOr(&words[i / 32], bits << i % 32); }

// ---- the kernel before this one, and the one after it

DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- the cluster: a barrier that orders nothing but `publish_barriers`, and stores to another block's shared memory that count their bytes in on its mbarrier

DEVICE void arrive_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE u32 remote_address(const void* p, int rank) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  return address;
}

// A barrier whose phase ends when one thread has armed it and the armed number of bytes has come.
DEVICE void init_barrier(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void arm_barrier(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

DEVICE void wait_barrier(u64* barrier, int parity) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

#define SEND "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"

DEVICE void send(u32* to, int rank, u32 value, u64* barrier) {
  asm volatile(SEND ".b32 [%0], %1, [%2];" ::"r"(remote_address(to, rank)), "r"(value), "r"(remote_address(barrier, rank))
               : "memory");
}

DEVICE void send(u64* to, int rank, u64 value, u64* barrier) {
  asm volatile(SEND ".b64 [%0], %1, [%2];" ::"r"(remote_address(to, rank)), "l"(value), "r"(remote_address(barrier, rank))
               : "memory");
}

DEVICE void send(Words4* to, int rank, Words4 v, u64* barrier) {
  asm volatile(SEND ".v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_address(to, rank)), "r"(v.x[0]), "r"(v.x[1]),
               "r"(v.x[2]), "r"(v.x[3]), "r"(remote_address(barrier, rank))
               : "memory");
}

// ---- the block

DEVICE u8* dynamic_shared() {
  extern __shared__ __align__(128) u8 shared_bytes[];
  return shared_bytes;
}

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name

// For benchmarks: the multiprocessor's clock at the end of each stage of the first CLOCKS blocks.
#ifdef CLOCKS
extern "C" __device__ u64 stage_clocks[CLOCKS][16];
#define MARK(stage)                                                                            \
  do {                                                                                         \
    const u32 block = blockIdx.y * gridDim.x + blockIdx.x;                                     \
    if (threadIdx.x == 0 && block < CLOCKS)                                                    \
      asm volatile("mov.u64 %0, %%clock64;" : "=l"(stage_clocks[block][(int)(stage)])::"memory"); \
  } while (0)
#else
#define MARK(stage)
#endif
