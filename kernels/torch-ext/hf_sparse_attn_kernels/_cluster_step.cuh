// Parts of decode steps on thread-block clusters, one cluster for each row and KV head, after _cluster.cuh: the counts of
// the bins of scores, attention to listed tokens, and the merge of the blocks' outputs. Macros: CLUSTER, THREADS, GROUP.
//
// `s` is a kernel's struct of shared memory, `at` its struct of places, `a` that of its arguments; the members that a
// function reads have the same names in all kernels.

constexpr int QUADS = GROUP * HEAD_DIM / 4;               // outputs by fours, in the order that registers have them
constexpr int QUADS_EACH = (QUADS + CLUSTER - 1) / CLUSTER;
constexpr u32 MINUS_INFINITY = 0xFF800000u;

enum Barrier { LSE, EVEN_COUNTS, ODD_COUNTS, CHOICE, OUTPUT, BARRIERS };

DEVICE u64 offset(u32 index, u32 stride) { return (u64)index * stride; }   // one instruction
DEVICE float bf16(u32 bits) { return as_float(bits << 16); }
DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }
DEVICE u64 packed(MaxSum x) { return (u64)as_bits(x.sum) << 32 | as_bits(x.max); }

// ---- scores

// Merge the log-sum-exp of every head, the rows of s.warp_lse, over rows and blocks: s.lse, or without SUMS the heads'
// greatest score. All blocks run then.
template <bool SUMS, class Shared, class Place>
DEVICE void exchange_lse(Shared& s, const Place& at) {
  constexpr int ROWS = sizeof(s.warp_lse) / sizeof(s.warp_lse[0]);
  sync_block();
  wait_cluster();                                         // all blocks run, and their barriers exist
  if (at.tid < CLUSTER * GROUP) {
    const int h = at.tid % GROUP;
    MaxSum all{LOW, 0.f};
#pragma unroll
    for (int row = 0; row < ROWS; row++) all.max = fmaxf(all.max, s.warp_lse[row][h].max);
#pragma unroll
    for (int row = 0; row < ROWS; row++) all.sum += s.warp_lse[row][h].sum * exp2_fast(s.warp_lse[row][h].max - all.max);
    send((u64*)&s.lse_in[at.rank][h], at.tid / GROUP, packed(all), &s.barriers[LSE]);
  }
  if (at.tid == 0) arm_barrier(&s.barriers[LSE], CLUSTER * GROUP * 8);
  if (at.warp < GROUP) {
    wait_barrier(&s.barriers[LSE], 0);
    MaxSum all = at.lane < CLUSTER ? s.lse_in[at.lane][at.warp] : MaxSum{LOW, 0.f};
#pragma unroll
    for (int mask = 1; mask < 16; mask *= 2) all = merge(all, MaxSum{shuffle_xor(all.max, mask), shuffle_xor(all.sum, mask)});
    if (at.lane == 0) s.lse[at.warp] = SUMS ? all.max + log2_fast(fmaxf(all.sum, 1e-30f)) : all.max;
  }
  sync_block();
}

// Send this block's histogram of BINS bins to all blocks. Theirs arrive in `counts_in`.
template <int BINS, class Shared, class Place>
DEVICE void send_counts(Shared& s, const Place& at, Words4 (&counts_in)[CLUSTER][BINS / 8], u64* barrier) {
  constexpr int VECTORS = BINS / 8;
  sync_block();                                           // the histogram is complete
#pragma unroll 1
  for (int i = at.tid; i < CLUSTER * VECTORS; i += THREADS) {
    const int v = i % VECTORS;
    const Words4 low = ((const Words4*)s.histogram)[2 * v], high = ((const Words4*)s.histogram)[2 * v + 1];
    const Words4 counts = {low.x[0] | low.x[1] << 16, low.x[2] | low.x[3] << 16, high.x[0] | high.x[1] << 16,
                           high.x[2] | high.x[3] << 16};
    send(&counts_in[at.rank][v], i / VECTORS, counts, barrier);
  }
  if (at.tid == 0) {
    arm_barrier(barrier, CLUSTER * BINS * 2);
    s.edge = s.above = s.level = 0;
  }
}

// The sum of `value` over the block's threads before this one.
template <class Shared, class Place>
DEVICE int sum_before(Shared& s, const Place& at, int value) {
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = shuffle_up(sum, distance);
    if (at.lane >= distance) sum += other;
  }
  if (at.lane == 31) s.warp_total[at.warp] = sum;
  sync_block();
  return sum + warp_sum(at.lane < at.warp ? s.warp_total[at.lane] : 0) - value;
}

// Find the bin in which the `need`-th member lies: s.edge, with s.above before it and s.level in it, if there are as many.
// The bins of a thread follow those of the threads before, and have so many.
template <int COUNT, class Shared, class Place>
DEVICE void find_bin(Shared& s, const Place& at, const int (&count)[COUNT], int need) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i++) sum += count[i];
  int before = sum_before(s, at, sum);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    if (before < need && need <= before + count[i]) s.edge = at.tid * COUNT + i, s.above = before, s.level = count[i];
    before += count[i];
  }
  sync_block();
}

// The same for the BINS bins of this block's histogram.
template <int BINS, class Shared, class Place>
DEVICE void find_bin(Shared& s, const Place& at, const u32* histogram, int need) {
  constexpr int BINS_EACH = BINS / THREADS > 0 ? BINS / THREADS : 1;
  int count[BINS_EACH];
  if (at.tid == 0) s.edge = s.above = s.level = 0;
  sync_block();                                           // the histogram is complete
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) {
    const int bin = at.tid * BINS_EACH + i;
    count[i] = bin < BINS ? (int)histogram[bin] : 0;
  }
  find_bin(s, at, count, need);
}

// Send this block's histogram of BINS bins to all blocks, add theirs up, and find the bin in which the `need`-th member
// lies: s.edge, with s.above before it and s.level in it; of each block, s.above_of (added up) and s.level_of. The bins
// arrive in `counts_in`, by the barrier's phase of this parity.
template <int BINS, class Shared, class Place>
DEVICE void find_edge(Shared& s, const Place& at, Words4 (&counts_in)[CLUSTER][BINS / 8], u64* barrier, int parity,
                      int need) {
  constexpr int VECTORS = BINS / 8, BINS_EACH = BINS / THREADS > 0 ? BINS / THREADS : 1;
  send_counts<BINS>(s, at, counts_in, barrier);
  wait_barrier(barrier, parity);
  int count[BINS_EACH];
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) {
    count[i] = 0;
    const int bin = at.tid * BINS_EACH + i;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) count[i] += bin < BINS ? ((const u16*)counts_in[c])[bin] : 0;
  }
  find_bin(s, at, count, need);
#pragma unroll 1
  for (int c = at.warp; c < CLUSTER; c += WARPS) {
    int above = 0;
#pragma unroll
    for (int v = at.lane; v < VECTORS; v += 32) {
      const Words4 counts = counts_in[c][v];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        above += 8 * v + 2 * j < s.edge ? (int)(counts.x[j] & 0xFFFF) : 0;
        above += 8 * v + 2 * j + 1 < s.edge ? (int)(counts.x[j] >> 16) : 0;
      }
    }
    above = warp_sum(above);
    if (at.lane == 0) s.above_of[c] += above, s.level_of[c] = ((const u16*)counts_in[c])[s.edge];
  }
}

// ---- attention

// Keys and values of 16 tokens as the operands of the two products: lane 4 g + t has channels 8 t to 8 t + 7 of each
// quarter of four keys' two tokens (g), and channels 8 g to 8 g + 7 of each half of tokens 4 t to 4 t + 3's values.
struct Tokens {
  Words4 keys[2][4], values[2][4];
};

// `rows` says where key(i) and value(i) of token i are, and whether it exists(i).
template <class Rows, class Place>
DEVICE void load_tokens(Tokens& tokens, const Rows& rows, const Place& at) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int i = 4 * (at.g >> 1) + (at.g & 1) + 2 * e;
    const bool exists = rows.exists(i);
    const u16* of_token = rows.key(i) + 8 * at.t;
    tokens.keys[e][0] = load16<0>(of_token, exists);
    tokens.keys[e][1] = load16<64>(of_token, exists);
    tokens.keys[e][2] = load16<128>(of_token, exists);
    tokens.keys[e][3] = load16<192>(of_token, exists);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const bool exists = rows.exists(4 * at.t + i);
    const u16* of_token = rows.value(4 * at.t + i) + 8 * at.g;
    tokens.values[0][i] = load16<0>(of_token, exists);
    tokens.values[1][i] = load16<128>(of_token, exists);
  }
}

struct Output {
  MaxSum total;                                           // of query head g
  float sums[16][2];                                      // [channels' product][columns 2 t, 2 t + 1]
};

// Attend to the first `count` of 16 tokens, at least one.
template <class Shared, class Place>
DEVICE void attend_tokens(Output& out, const Tokens& tokens, const Shared& s, const Place& at, int count, float scale) {
  float c[2][4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Words4 q = {{0, 0, 0, 0}};
    if (at.g < GROUP) q = *(const Words4*)&s.query[at.g][(4 * i + at.t) * 8];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      multiply_bf16(c[e], q.x[0], q.x[1], tokens.keys[e][i].x[0], tokens.keys[e][i].x[1]);
      multiply_bf16(c[e], q.x[2], q.x[3], tokens.keys[e][i].x[2], tokens.keys[e][i].x[3]);
    }
  }
  float weight[4], top = out.total.max;                   // of tokens 4 t to 4 t + 3
#pragma unroll
  for (int i = 0; i < 4; i++) {
    weight[i] = 4 * at.t + i < count ? c[i >> 1][i & 1] * scale : LOW;
    top = fmaxf(top, weight[i]);
  }
  top = fmaxf(top, shuffle_xor(top, 1));
  top = fmaxf(top, shuffle_xor(top, 2));
  const float decay = exp2_fast(out.total.max - top);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += weight[i] = exp2_fast(weight[i] - top);   // 0 for LOW: the first token exists
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  out.total = MaxSum{top, out.total.sum * decay + sum};
  const u32 a0 = to_bf16x2(weight[0], weight[1]), a2 = to_bf16x2(weight[2], weight[3]);
#pragma unroll
  for (int n = 0; n < 16; n++) {
    const Words4* v = tokens.values[n / 8];
    const int word = n % 8 / 2;
    const u32 half = n & 1 ? 0x7632 : 0x5410;
    float sums[4] = {out.sums[n][0] * decay, out.sums[n][1] * decay, 0.f, 0.f};
    multiply_bf16(sums, a0, a2, permute_bytes(v[0].x[word], v[1].x[word], half), permute_bytes(v[2].x[word], v[3].x[word], half));
    out.sums[n][0] = sums[0], out.sums[n][1] = sums[1];
  }
}

// Merge the warps' outputs and send each block its share. `quads` has room for those of all warps.
template <class Shared, class Place>
DEVICE void send_output(Shared& s, const Place& at, const Output& out, Words4* quads) {
  if (at.g < GROUP) {
    if (at.t == 0) s.warp_output[at.warp][at.g] = out.total;
#pragma unroll
    for (int k = 0; k < 8; k++) {                         // half of the channels, column, half of its eight channels
      Words4 four;
#pragma unroll
      for (int j = 0; j < 4; j++) four.x[j] = as_bits(out.sums[(k >> 2) * 8 + (k & 1) * 4 + j][k >> 1 & 1]);
      quads[(at.warp * 8 + k) * GROUP * 4 + at.g * 4 + at.t] = four;
    }
  }
  sync_block();
  if (at.tid < QUADS) {
    static_assert(QUADS <= THREADS, "a thread for every four outputs");
    const int h = at.tid % (GROUP * 4) / 4;
    float top = LOW, factor[WARPS], sum[4] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, factor[w] = s.warp_output[w][h].max);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      factor[w] = exp2_fast(factor[w] - top);
      const Words4 four = quads[w * QUADS + at.tid];
#pragma unroll
      for (int j = 0; j < 4; j++) sum[j] += factor[w] * as_float(four.x[j]);
    }
    send(&s.output_in[at.rank][at.tid % QUADS_EACH], at.tid / QUADS_EACH,
         Words4{{as_bits(sum[0]), as_bits(sum[1]), as_bits(sum[2]), as_bits(sum[3])}}, &s.barriers[OUTPUT]);
  }
  const int last = THREADS - 1 - at.tid;                  // threads that had none of the outputs, if there are any
  if (last < CLUSTER * GROUP) {
    const int h = last % GROUP;
    float top = LOW, sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, s.warp_output[w][h].max);
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += exp2_fast(s.warp_output[w][h].max - top) * s.warp_output[w][h].sum;
    send((u64*)&s.sums_in[at.rank][h], last / GROUP, packed(MaxSum{top, sum}), &s.barriers[OUTPUT]);
  }
  if (at.tid == 0) {
    const int quads_here = clamp(QUADS - at.rank * QUADS_EACH, 0, QUADS_EACH);
    arm_barrier(&s.barriers[OUTPUT], CLUSTER * (quads_here * 16 + GROUP * 8));
  }
}

// Merge the blocks' shares, which have come, and store this block's part of the outputs.
template <class Shared, class Arguments, class Place>
DEVICE void write_output(const Shared& s, const Arguments& a, const Place& at) {
#pragma unroll 1
  for (int i = at.tid; i < QUADS_EACH * 4; i += THREADS) {
    const int quad = at.rank * QUADS_EACH + i / 4;
    if (quad >= QUADS) break;
    const int k = quad / (GROUP * 4), h = quad % (GROUP * 4) / 4, t = quad % 4;
    const int channel = (k >> 2) * 64 + (2 * t + (k >> 1 & 1)) * 8 + (k & 1) * 4 + i % 4;
    float top = LOW, total = 0.f, sum = 0.f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) top = fmaxf(top, s.sums_in[c][h].max);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      const float factor = exp2_fast(s.sums_in[c][h].max - top);
      total += factor * s.sums_in[c][h].sum;
      sum += factor * as_float(s.output_in[c][i / 4].x[i % 4]);
    }
    const long long head = (long long)at.pair * GROUP + h;
    a.out[head * HEAD_DIM + channel] = (u16)to_bf16x2(total == 0.f ? 0.f : sum / total, 0.f);
    if (channel == 0) a.lse[head] = total == 0.f ? as_float(MINUS_INFINITY) : (top + log2_fast(total)) * LN_2;
  }
}
