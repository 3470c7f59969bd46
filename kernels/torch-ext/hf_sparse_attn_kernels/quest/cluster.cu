// Quest's decode step in one launch: a cluster of CLUSTER blocks for each row and KV head appends the token, scores the
// pages, chooses among them, attends and merges. Compiled with _cluster.cuh before it and these macros:
// CLUSTER (1 to 16), THREADS (of a block, 256 or 512), BLOCKS (that a multiprocessor has registers for), GROUP (1 to 8),
// REDUCE (0: softmax, 1: mean, 2: max), FIXED_BYTES (set apart for Shared); for benchmarks CLOCKS, see MARK.
//
// The blocks of a cluster score tiles of 16 pages in turn. They meet four times, each time by stores to each other's
// shared memory that count themselves in on a barrier there: for the log-sum-exp of every query head, for the counts of
// the bins of scores, for the chosen pages, and for the partial outputs. Nothing depends on the order of arrival.

struct Arguments {
  const u16 *query, *new_key, *new_value;                          // bf16
  u16 *keys, *values;                                              // bf16
  s8 *page_min, *page_max, *page_exponent, *channel_exponent;      // the exponents are contiguous
  const int *seq_start, *seq_end;
  u64* counter;                                                    // [4], or null
  u16* out;                                                        // bf16 [batch, q_heads, HEAD_DIM]
  float* lse;                                                      // [batch, q_heads]
  int* block_indices;                                              // [batch, kv_heads, max_blocks]
  int* block_counts;                                               // [batch, kv_heads]
  long long query_b, query_h, query_d, new_key_b, new_key_h, new_value_b, new_value_h;  // strides, in elements
  long long keys_b, keys_h, keys_n, values_b, values_h, values_n;
  long long min_b, min_h, min_p, max_b, max_h, max_p;
  int kv_heads, capacity, max_pages, num_pages, max_blocks, sink_blocks, recent_blocks;
  int local_pages;                                                 // most pages of a block, a multiple of 32
  float scale;
};

constexpr int WARPS = THREADS / 32, HEAD_DIM = 128, PAGE = 16, TILE = 16;
constexpr int SETS = (GROUP + 3) / 4;                     // products of a tile: each has eight columns, two a query head
constexpr int BINS = 512, BINS_EACH = BINS / THREADS > 0 ? BINS / THREADS : 1;
constexpr int MOST_CANDIDATES = 128, MOST_READ = 512, MOST_EACH = (MOST_READ + CLUSTER - 1) / CLUSTER;
constexpr int QUADS = GROUP * HEAD_DIM / 4;               // outputs by fours, in the order that registers have them
constexpr int QUADS_EACH = (QUADS + CLUSTER - 1) / CLUSTER;
constexpr int ELEMENTS = (GROUP * HEAD_DIM + THREADS - 1) / THREADS;
constexpr float LOW = -1e30f, LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr u32 MINUS_INFINITY = 0xFF800000u, FORCED = 0xFFFFFFFFu;
constexpr int NO_PAGE = 0x7FFFFFFF;
static_assert(MOST_CANDIDATES % 8 == 0 && MOST_CANDIDATES <= THREADS && MOST_READ % 16 == 0, "lists are read several at once");

enum Barrier { LSE, EVEN_COUNTS, ODD_COUNTS, CHOICE, OUTPUT, BARRIERS };
enum Kind { OUT, CANDIDATE, CHOSEN };
enum class Stage { START, QUERY, SCORES, EXCHANGE, KEYS, EDGE, LIST, RANK, ATTEND, MERGE, WRITE };  // STAGES in cluster.py

struct alignas(8) MaxSum { float max, sum; };             // of exponentials with base 2, relative to the maximum

struct Shared {
  Words4 counts_in[2][CLUSTER][BINS / 8];                 // u16 of each block's bins
  Words4 output_in[CLUSTER][QUADS_EACH];
  alignas(16) u8 query_bytes[2][8 * SETS][HEAD_DIM];      // magnitudes where positive, where negative; high, low by turns
  alignas(16) u16 query[GROUP][HEAD_DIM + 8];
  alignas(16) int chosen[MOST_READ];                      // in the first block: all chosen pages
  u64 candidates[MOST_CANDIDATES];
  u64 barriers[BARRIERS];
  MaxSum warp_lse[WARPS + 1][GROUP], lse_in[CLUSTER][GROUP], warp_output[WARPS][GROUP], sums_in[CLUSTER][GROUP];
  float unit[GROUP], lse[GROUP];
  u32 largest[GROUP * 4];
  alignas(16) u32 histogram[BINS];
  int warp_total[WARPS], above_of[CLUSTER], level_of[CLUSTER];
  int edge, above, level;
  int pages[MOST_EACH];                                   // that this block attends to
};

struct Place {
  int tid, lane, warp, g, t;                              // lane = 4 g + t, as the tensor cores number rows and columns
  int rank, pair, row, head;
  int start, end, length, row_pages, last_page;           // last_page: the new token's
  int tiles;                                              // of this block
};

DEVICE u64 offset(u32 index, u32 stride) { return (u64)index * stride; }   // one instruction
DEVICE float bf16(u32 bits) { return as_float(bits << 16); }
DEVICE float power_of_two(int exponent) { return as_float((u32)(exponent + 127) << 23); }
DEVICE float clamp(float x, float low, float high) { return fmaxf(fminf(x, high), low); }
DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }
DEVICE u64 packed(MaxSum x) { return (u64)as_bits(x.sum) << 32 | as_bits(x.max); }

// The smallest e with x <= (1 + fraction / 2**23) * 64 * 2**e.
DEVICE int exponent_for(float x, u32 fraction) {
  const u32 bits = as_bits(x);
  return (int)(bits >> 23) - 133 + ((bits & 0x7FFFFF) > fraction);
}

DEVICE MaxSum merge(MaxSum a, MaxSum b) {
  const float top = fmaxf(a.max, b.max);
  return MaxSum{top, a.sum * exp2_fast(a.max - top) + b.sum * exp2_fast(b.max - top)};
}

// The page of a block's `local` one: tiles go to the blocks by turns.
DEVICE int page_of(const Place& at, u32 local) { return ((local / TILE) * CLUSTER + at.rank) * TILE + local % TILE; }

// ---- scores

struct Tile {
  Words4 upper[2][2], lower[2][2];                        // [pages g, g + 8][channels 0 to 63, 64 to 127]
  int exponent[2];
};

// A lane's part of the bounds: of the page that is its row of the block's first tile.
struct Bounds {
  const s8 *upper, *lower, *exponent;
  u32 upper_p, lower_p;
  int page, num_pages;
};

DEVICE Bounds bounds_of(const Arguments& a, const Place& at) {
  const int page = at.rank * TILE + at.g;
  const s8* upper = a.page_max + at.row * a.max_b + at.head * a.max_h + offset(page, a.max_p) + 16 * at.t;
  const s8* lower = a.page_min + at.row * a.min_b + at.head * a.min_h + offset(page, a.min_p) + 16 * at.t;
  return Bounds{upper, lower, a.page_exponent + (long long)at.pair * a.max_pages + page, (u32)a.max_p, (u32)a.min_p, page, a.num_pages};
}

DEVICE void load_tile(Tile& tile, const Bounds& of, int n) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u32 step = n * (CLUSTER * TILE) + 8 * r;
    const bool exists = of.page + step < of.num_pages;
    const s8 *upper = of.upper + offset(step, of.upper_p), *lower = of.lower + offset(step, of.lower_p);
    tile.upper[r][0] = load16<0>(upper, exists);
    tile.lower[r][0] = load16<0>(lower, exists);
    tile.upper[r][1] = load16<64>(upper, exists);
    tile.lower[r][1] = load16<64>(lower, exists);
    tile.exponent[r] = load_s8(of.exponent + step, exists);
  }
}

// A thread's elements of the query, and the exponents of their channels.
struct QueryParts {
  u16 query[ELEMENTS];
  s8 exponent[ELEMENTS];
};

DEVICE QueryParts load_query(const Arguments& a, const Place& at) {
  QueryParts parts;
#pragma unroll
  for (int i = 0; i < ELEMENTS; i++) {
    const int at_element = i * THREADS + at.tid, h = at_element / HEAD_DIM, d = at_element % HEAD_DIM;
    const bool exists = at_element < GROUP * HEAD_DIM;
    parts.query[i] = exists ? a.query[at.row * a.query_b + (at.head * GROUP + h) * a.query_h + d * a.query_d] : 0;
    parts.exponent[i] = exists ? a.channel_exponent[(long long)at.pair * HEAD_DIM + d] : 0;
  }
  return parts;
}

// The query in units of the bounds, as whole numbers of 16 bits: bytes for products with the levels, exact sums.
// bf16 has 8 bits, so only channels below 2**-8 of the largest are rounded, to 2**-16 of it.
DEVICE void split_query(Shared& s, const Arguments& a, const Place& at, const QueryParts& parts) {
  float scaled[ELEMENTS];
#pragma unroll
  for (int i = 0; i < ELEMENTS; i++) {
    const int at_element = i * THREADS + at.tid, h = at_element / HEAD_DIM, d = at_element % HEAD_DIM;
    scaled[i] = bf16(parts.query[i]) * power_of_two(parts.exponent[i]);
    if (at_element < GROUP * HEAD_DIM) {                  // the same for a warp
      s.query[h][d] = parts.query[i];
      const u32 largest = warp_max(as_bits(fabsf(scaled[i])));
      if (at.lane == 0) s.largest[at_element / 32] = largest;
    }
  }
  sync_block();
#pragma unroll
  for (int i = 0; i < ELEMENTS; i++) {
    const int at_element = i * THREADS + at.tid, h = at_element / HEAD_DIM, d = at_element % HEAD_DIM;
    if (at_element < GROUP * HEAD_DIM) {
      const u32* of_head = s.largest + 4 * h;
      const u32 largest = max(max(of_head[0], of_head[1]), max(of_head[2], of_head[3]));
      const int exponent = clamp((int)(largest >> 23) - 127 - 15, -126, 111);
      const u32 magnitude = (u32)__float2int_rn(fminf(fabsf(scaled[i]) * power_of_two(-exponent), 65535.f));
      const int sign = scaled[i] < 0.f, column = 2 * h;
      s.query_bytes[sign][column][d] = (u8)(magnitude >> 8);
      s.query_bytes[sign][column + 1][d] = (u8)magnitude;
      s.query_bytes[!sign][column][d] = s.query_bytes[!sign][column + 1][d] = 0;
      if (d == 0) s.unit[h] = a.scale * LOG2_E * power_of_two(exponent);
    }
  }
#pragma unroll 1
  for (int i = at.tid; i < 2 * (8 * SETS - 2 * GROUP) * HEAD_DIM; i += THREADS) {
    const int empty = 8 * SETS - 2 * GROUP > 0 ? 8 * SETS - 2 * GROUP : 1;
    s.query_bytes[i / (empty * HEAD_DIM)][2 * GROUP + i / HEAD_DIM % empty][i % HEAD_DIM] = 0;
  }
  sync_block();
}

// The token, its page's bounds, and the page's scores; one warp, with four channels a lane.
DEVICE void append(Shared& s, const Arguments& a, const Place& at, float* scores, int stride) {
  const int d = at.lane * 4, offset = at.length - 1;
  const bool has_others = offset % PAGE > 0;
  const u16* new_key = a.new_key + at.row * a.new_key_b + at.head * a.new_key_h + d;
  const u16* new_value = a.new_value + at.row * a.new_value_b + at.head * a.new_value_h + d;
  u16* key_out = a.keys + at.row * a.keys_b + at.head * a.keys_h + (at.end - 1) * a.keys_n + d;
  u16* value_out = a.values + at.row * a.values_b + at.head * a.values_h + (at.end - 1) * a.values_n + d;
  s8* page_min = a.page_min + at.row * a.min_b + at.head * a.min_h + at.last_page * a.min_p + d;
  s8* page_max = a.page_max + at.row * a.max_b + at.head * a.max_h + at.last_page * a.max_p + d;
  s8* page_exponent = a.page_exponent + (long long)at.pair * a.max_pages + at.last_page;
  s8* channel_exponent = a.channel_exponent + (long long)at.pair * HEAD_DIM + d;

  u16 key[4], value[4];
  int old_lower[4], old_upper[4], exponent[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    key[i] = new_key[i], value[i] = new_value[i];
    old_lower[i] = page_min[i], old_upper[i] = page_max[i], exponent[i] = channel_exponent[i];
  }
  const int old_exponent = has_others ? *page_exponent : 0;
  float scaled[4], largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    key_out[i] = key[i], value_out[i] = value[i];
    const float magnitude = fabsf(bf16(key[i])), partner = shuffle_xor(magnitude, 16);
    if (offset == 0) {
      exponent[i] = clamp(exponent_for(fmaxf(magnitude, partner), 3407872), -60, 60);   // 90 levels, 127 if rotated
      channel_exponent[i] = (s8)exponent[i];
    }
    scaled[i] = bf16(key[i]) * power_of_two(-exponent[i]);
    largest = fmaxf(largest, fabsf(scaled[i]));
  }
  largest = as_float(warp_max(as_bits(largest)));
  const int new_exponent = max(clamp(exponent_for(largest, 8257536), 0, 60), old_exponent);  // 127 levels
  const float down = power_of_two(-new_exponent), step = power_of_two(old_exponent - new_exponent);
  float lower[4], upper[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    lower[i] = clamp(floorf(scaled[i] * down), -127.f, 127.f);
    upper[i] = clamp(ceilf(scaled[i] * down), -127.f, 127.f);
    if (has_others) {
      lower[i] = fminf(lower[i], clamp(floorf(old_lower[i] * step), -127.f, 127.f));
      upper[i] = fmaxf(upper[i], clamp(ceilf(old_upper[i] * step), -127.f, 127.f));
    }
    page_min[i] = (s8)lower[i], page_max[i] = (s8)upper[i];
  }
  if (at.lane == 0) *page_exponent = (s8)new_exponent;
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float q = bf16(s.query[h][d + i]) * power_of_two(exponent[i]);
      score += fmaxf(q * lower[i], q * upper[i]);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) score += shuffle_xor(score, mask);
    score *= a.scale * LOG2_E * power_of_two(new_exponent);
    if (at.lane == 0) {
      scores[h * stride + (at.last_page / TILE / CLUSTER) * TILE + at.last_page % TILE] = score;
      s.warp_lse[WARPS][h] = MaxSum{score, 1.f};
    }
  }
}

// Scores of the tiles of a warp, and their log-sum-exp. A lane has query heads t and t + 4 of pages g and g + 8.
DEVICE void score_tile(const Tile& tile, const Words4 (&bytes)[2][SETS][2], const float (&unit)[SETS],
                       const Place& at, int n, float* scores, int stride, MaxSum (&lse)[SETS]) {
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    int above[4] = {0, 0, 0, 0}, below[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const Words4 &u0 = tile.upper[0][c], &u1 = tile.upper[1][c], &l0 = tile.lower[0][c], &l1 = tile.lower[1][c];
        const Words4 &positive = bytes[0][set][c], &negative = bytes[1][set][c];
        multiply_s8u8(above, u0.x[i], u1.x[i], u0.x[i + 1], u1.x[i + 1], positive.x[i], positive.x[i + 1]);
        multiply_s8u8(below, l0.x[i], l1.x[i], l0.x[i + 1], l1.x[i + 1], negative.x[i], negative.x[i + 1]);
      }
    float score[2], top = lse[set].max;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int local = n * TILE + at.g + 8 * r, head = 4 * set + at.t;
      const int sum = (above[2 * r] - below[2 * r]) * 256 + (above[2 * r + 1] - below[2 * r + 1]);
      const bool exists = page_of(at, local) < at.last_page;   // the last page is scored with its new token
      score[r] = exists ? (float)sum * (unit[set] * power_of_two(tile.exponent[r])) : LOW;
      if (exists && head < GROUP) scores[head * stride + local] = score[r];
      top = fmaxf(top, score[r]);
    }
    const float others = lse[set].sum * exp2_fast(lse[set].max - top);
    lse[set] = MaxSum{top, others + exp2_fast(score[0] - top) + exp2_fast(score[1] - top)};
  }
}

DEVICE void score_pages(Shared& s, const Arguments& a, const Bounds& bounds, Place& at, float* scores, int stride) {
  at.start = a.seq_start[at.row], at.end = a.seq_end[at.row];
  const QueryParts query = load_query(a, at);             // before the tiles, behind which it would have to wait
  Tile tiles[2];                                          // in flight before the row's length is known
  load_tile(tiles[0], bounds, at.warp);
  load_tile(tiles[1], bounds, at.warp + WARPS);
  if (at.tid < GROUP) s.warp_lse[WARPS][at.tid] = MaxSum{LOW, 0.f};
#pragma unroll 1
  for (int i = at.tid; i < BINS; i += THREADS) s.histogram[i] = 0;
#pragma unroll 1
  for (int i = at.tid; i < MOST_READ; i += THREADS) s.chosen[i] = NO_PAGE;
  if (at.tid < MOST_CANDIDATES) s.candidates[at.tid] = 0;
  split_query(s, a, at, query);
  MARK(Stage::QUERY);
  at.length = max(at.end - at.start, 0);
  at.row_pages = min((at.length + PAGE - 1) / PAGE, a.num_pages);
  at.last_page = max(at.row_pages - 1, 0);
  at.tiles = ((at.row_pages + TILE - 1) / TILE - at.rank + CLUSTER - 1) / CLUSTER;
  if (at.warp == WARPS - 1 && at.length > 0 && at.last_page / TILE % CLUSTER == at.rank)
    append(s, a, at, scores, stride);

  Words4 bytes[2][SETS][2];                               // a column's channels, as the tiles have them
  float unit[SETS];
  MaxSum lse[SETS];
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    unit[set] = 4 * set + at.t < GROUP ? s.unit[4 * set + at.t] : 0.f;
    lse[set] = MaxSum{LOW, 0.f};
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int sign = 0; sign < 2; sign++)
        bytes[sign][set][c] = *(const Words4*)&s.query_bytes[sign][8 * set + at.g][(4 * c + at.t) * 16];
  }
#pragma unroll 1
  for (int n = at.warp; n < at.tiles; n += 2 * WARPS)
#pragma unroll
    for (int slot = 0; slot < 2; slot++) {
      const int of_slot = n + slot * WARPS;
      if (of_slot < at.tiles) score_tile(tiles[slot], bytes, unit, at, of_slot, scores, stride, lse);
      if (of_slot + 2 * WARPS < at.tiles) load_tile(tiles[slot], bounds, of_slot + 2 * WARPS);
    }
#pragma unroll
  for (int set = 0; set < SETS; set++) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2)
      lse[set] = merge(lse[set], MaxSum{shuffle_xor(lse[set].max, mask), shuffle_xor(lse[set].sum, mask)});
    if (at.g == 0 && 4 * set + at.t < GROUP) s.warp_lse[at.warp][4 * set + at.t] = lse[set];
  }
}

// Exchange the log-sum-exp of the heads; s.lse is that of the row, or for other reductions the heads' greatest score.
DEVICE void exchange_lse(Shared& s, const Place& at) {
  sync_block();
  wait_cluster();                                         // all blocks run, and their barriers exist
  if (at.tid < CLUSTER * GROUP) {
    const int h = at.tid % GROUP;
    MaxSum all = s.warp_lse[WARPS][h];
#pragma unroll
    for (int w = 0; w < WARPS; w++) all.max = fmaxf(all.max, s.warp_lse[w][h].max);
    all.sum *= exp2_fast(s.warp_lse[WARPS][h].max - all.max);
#pragma unroll
    for (int w = 0; w < WARPS; w++) all.sum += s.warp_lse[w][h].sum * exp2_fast(s.warp_lse[w][h].max - all.max);
    send((u64*)&s.lse_in[at.rank][h], at.tid / GROUP, packed(all), &s.barriers[LSE]);
  }
  if (at.tid == 0) arm_barrier(&s.barriers[LSE], CLUSTER * GROUP * 8);
  if (at.warp < GROUP) {
    wait_barrier(&s.barriers[LSE], 0);
    MaxSum all = at.lane < CLUSTER ? s.lse_in[at.lane][at.warp] : MaxSum{LOW, 0.f};
#pragma unroll
    for (int mask = 1; mask < 16; mask *= 2) all = merge(all, MaxSum{shuffle_xor(all.max, mask), shuffle_xor(all.sum, mask)});
    if (at.lane == 0) s.lse[at.warp] = REDUCE == 0 && GROUP > 1 ? all.max + log2_fast(all.sum) : all.max;
  }
  sync_block();
}

// ---- the choice

// The score of a page, reduced over the group, in the units of logarithms with base 2.
DEVICE float reduced(const float* scores, int stride, const float (&lse)[GROUP], int local) {
  float best = as_float(MINUS_INFINITY), sum = 0.f;
  if (REDUCE == 1) {
#pragma unroll
    for (int h = 0; h < GROUP; h++) sum += scores[h * stride + local];
    return sum / GROUP;
  }
  if (REDUCE == 2 || GROUP == 1) {
#pragma unroll
    for (int h = 0; h < GROUP; h++) best = fmaxf(best, scores[h * stride + local]);
    return best;
  }
  float log_weight[GROUP];
#pragma unroll
  for (int h = 0; h < GROUP; h++) best = fmaxf(best, log_weight[h] = scores[h * stride + local] - lse[h]);
#pragma unroll
  for (int h = 0; h < GROUP; h++) sum += exp2_fast(log_weight[h] - best);
  return best + log2_fast(sum);
}

// Whole numbers in the order of the scores; NaN as -inf.
DEVICE u32 order_key(float score) {
  const u32 bits = score == score ? as_bits(score + 0.f) : MINUS_INFINITY;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The bin of a key: 64 for each doubling of the distance from `top` plus one, best first. Forced pages have the first.
DEVICE int bin_of(u32 key, float top) {
  if (key == FORCED) return 0;
  const float score = as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
  const u32 bits = as_bits(fmaxf(top - score, 0.f) + 1.f) - 0x3F800000u;
  return (int)min(bits >> 17, (u32)BINS - 1);
}

// Where the choice ends: pages in bins before `edge` are chosen; those in it are candidates, or with `shift` below 48,
// those of them whose ranks begin with `prefix`, and chosen if they begin with more.
struct Edge {
  int bin, shift;
  u64 prefix;
  bool all;                                               // of the candidates are chosen
};

// Key and page in one number: pages with equal scores come in ascending order.
DEVICE u64 rank_of(u32 key, int page) { return (u64)key << 16 | (u32)(0xFFFF - page); }

DEVICE int digit_bin(u64 rank, int shift) { return 255 - (int)(rank >> shift & 255); }

DEVICE Kind kind_of(const Edge& edge, int bin, u64 rank) {
  if (bin != edge.bin) return bin < edge.bin ? CHOSEN : OUT;
  if (edge.shift < 48) {
    const u64 digits = rank >> edge.shift;
    if (digits != edge.prefix) return digits > edge.prefix ? CHOSEN : OUT;
  }
  return edge.all ? CHOSEN : CANDIDATE;
}

// Keys and values of a page to the L2 cache, where they are one piece.
DEVICE void prefetch_page(const Arguments& a, const Place& at, int page) {
  const int first = at.start + page * PAGE, bytes = min(PAGE, a.capacity - first) * HEAD_DIM * 2;
  if (a.keys_n != HEAD_DIM || a.values_n != HEAD_DIM) return;
  prefetch_l2(a.keys + at.row * a.keys_b + at.head * a.keys_h + first * a.keys_n, bytes);
  prefetch_l2(a.values + at.row * a.values_b + at.head * a.values_h + first * a.values_n, bytes);
}


// Send this block's histogram to all blocks, add theirs up, and find the bin in which the `need`-th page lies.
DEVICE void find_edge(Shared& s, const Place& at, int round, int need) {
  constexpr int VECTORS = BINS / 8;
  u64* barrier = &s.barriers[round & 1 ? ODD_COUNTS : EVEN_COUNTS];
  Words4(*counts_in)[VECTORS] = s.counts_in[round & 1];
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
  wait_barrier(barrier, round >> 1 & 1);
  int count[BINS_EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) {
    count[i] = 0;
    const int bin = at.tid * BINS_EACH + i;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) count[i] += bin < BINS ? ((const u16*)counts_in[c])[bin] : 0;
    sum += count[i];
  }
  int before = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = shuffle_up(before, distance);
    if (at.lane >= distance) before += other;
  }
  if (at.lane == 31) s.warp_total[at.warp] = before;
  sync_block();
  before += warp_sum(at.lane < at.warp ? s.warp_total[at.lane] : 0) - sum;
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) {
    if (before < need && need <= before + count[i]) s.edge = at.tid * BINS_EACH + i, s.above = before, s.level = count[i];
    before += count[i];
  }
  sync_block();
#pragma unroll 1
  for (int c = at.warp; c < CLUSTER; c += WARPS) {        // of every block: pages above the edge, and at it
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

struct Choice {
  int count, sure, level;                                 // pages to read; those above the edge; candidates
};

// Choose pages and send them out: number n of the chosen ones to block n % CLUSTER, and all to the first block;
// candidates, if not all are chosen, to every block.
DEVICE Choice choose(Shared& s, const Arguments& a, const Place& at, float* scores, int stride, u32* word_counts) {
  u32* keys = (u32*)scores;                               // each thread's take the place of its scores
  const int local_pages = at.tiles * TILE, rounds = (local_pages + THREADS - 1) / THREADS;
  float lse[GROUP], top = REDUCE == 2 ? LOW : 0.f;
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    lse[h] = s.lse[h];
    top = REDUCE == 1 ? top + lse[h] / GROUP : fmaxf(top, lse[h]);
  }
  if (REDUCE != 1 && GROUP == 1) top = lse[0];
  if (REDUCE == 0 && GROUP > 1) top = log2_fast((float)GROUP);
#pragma unroll 1
  for (int i = at.tid; i < CLUSTER; i += THREADS) s.above_of[i] = 0;
#pragma unroll 2
  for (int local = at.tid; local < local_pages; local += THREADS) {
    const int page = page_of(at, local);
    u32 key = 0;
    if (page < at.row_pages) {
      const bool forced = page < a.sink_blocks || page >= at.row_pages - a.recent_blocks;
      key = forced ? FORCED : order_key(reduced(scores, stride, lse, local));
      add_shared(&s.histogram[bin_of(key, top)]);
    }
    keys[local] = key;
  }
  MARK(Stage::KEYS);

  const int count = min(at.row_pages, a.max_blocks);
  Edge edge{0, 48, 0, false};
  int need = count, level = 0;
#pragma unroll 1
  for (int round = 0;; round++) {                         // the same in all blocks
    find_edge(s, at, round, need);
    if (round == 0)
      edge.bin = s.edge;
    else
      edge.prefix = edge.prefix << 8 | (u32)(255 - s.edge);
    need -= s.above, level = s.level;
    edge.all = level == need;
    if (edge.all || level <= MOST_CANDIDATES) break;
    sync_block();
#pragma unroll 1
    for (int i = at.tid; i < BINS; i += THREADS) s.histogram[i] = 0;
    sync_block();
#pragma unroll 1
    for (int local = at.tid; local < local_pages; local += THREADS) {
      const int page = page_of(at, local);
      const u64 rank = rank_of(keys[local], page);
      if (page < at.row_pages && kind_of(edge, bin_of(keys[local], top), rank) == CANDIDATE)
        add_shared(&s.histogram[digit_bin(rank, edge.shift - 8)]);
    }
    edge.shift -= 8;
  }
  MARK(Stage::EDGE);

  // Chosen pages and candidates of every word of 32 pages, whose sums are the places of each.
#pragma unroll 1
  for (int i = 0; i < rounds; i++) {
    const int local = i * THREADS + at.tid, page = page_of(at, local);
    Kind kind = OUT;
    if (local < local_pages && page < at.row_pages) kind = kind_of(edge, bin_of(keys[local], top), rank_of(keys[local], page));
    const u32 counts = count_bits(warp_ballot(kind == CHOSEN)) | count_bits(warp_ballot(kind == CANDIDATE)) << 16;
    if (at.lane == 0) word_counts[i * WARPS + at.warp] = counts;
  }
  sync_block();
  const int sent_level = edge.all ? 0 : level, sure = count - (edge.all ? 0 : need);
  int place = warp_sum(at.lane < at.rank && at.lane < CLUSTER ? s.above_of[at.lane] + (edge.all ? s.level_of[at.lane] : 0) : 0);
  int candidate = warp_sum(at.lane < at.rank && at.lane < CLUSTER ? s.level_of[at.lane] : 0);
  const u32 lanes_below = (1u << at.lane) - 1;
#pragma unroll 1
  for (int i = 0, word = 0; i < rounds; i++) {            // word: up to which the places count
    const int mine = i * WARPS + at.warp;
    int between = 0;
#pragma unroll 1
    for (int j = word + at.lane; j < mine; j += 32) between += (int)word_counts[j];
    between = warp_sum(between);
    place += between & 0xFFFF, candidate += between >> 16, word = mine;
    const int local = i * THREADS + at.tid, page = page_of(at, local);
    Kind kind = OUT;
    if (local < local_pages && page < at.row_pages) kind = kind_of(edge, bin_of(keys[local], top), rank_of(keys[local], page));
    const u32 chosen = warp_ballot(kind == CHOSEN), candidates = warp_ballot(kind == CANDIDATE);
    if (kind != OUT) prefetch_page(a, at, page);
    if (kind == CHOSEN) {
      const int n = place + count_bits(chosen & lanes_below);
      send((u32*)&s.pages[n / CLUSTER], n % CLUSTER, (u32)page, &s.barriers[CHOICE]);
      send((u32*)&s.chosen[n], 0, (u32)page, &s.barriers[CHOICE]);
    }
    if (kind == CANDIDATE) {
      const int n = candidate + count_bits(candidates & lanes_below);
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) send(&s.candidates[n], c, rank_of(keys[local], page), &s.barriers[CHOICE]);
    }
  }
  if (at.tid == 0) {
    const int own = at.rank < sure ? (sure - at.rank + CLUSTER - 1) / CLUSTER : 0;
    arm_barrier(&s.barriers[CHOICE], 4 * (own + (at.rank == 0 ? sure : 0)) + 8 * sent_level);
  }
  return Choice{count, sure, sent_level};
}

// Rank the candidates among themselves: in every block, which keeps its own.
DEVICE void choose_candidates(Shared& s, const Place& at, const Choice& choice) {
#pragma unroll 1
  for (int i = at.tid; i < choice.level; i += THREADS) {
    const u64 rank = s.candidates[i];
    int n = choice.sure;
#pragma unroll 1
    for (int j = 0; j < choice.level; j += 8)             // zeros after the last
#pragma unroll
      for (int k = 0; k < 8; k++) n += s.candidates[j + k] > rank;
    const int page = 0xFFFF - (int)(rank & 0xFFFF);
    if (n < choice.count && n % CLUSTER == at.rank) s.pages[n / CLUSTER] = page;
    if (n < choice.count && at.rank == 0) s.chosen[n] = page;
  }
}

// ---- attention

// Keys and values of a page as the operands of the two products: lane 4 g + t has channels 8 t to 8 t + 7 of each
// quarter of four keys' two tokens (g), and channels 8 g to 8 g + 7 of each half of tokens 4 t to 4 t + 3's values.
struct PageTokens {
  Words4 keys[2][4], values[2][4];
};

DEVICE void load_page(PageTokens& tokens, const Arguments& a, const Place& at, const u16* keys, const u16* values, int first) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int token = first + 4 * (at.g >> 1) + (at.g & 1) + 2 * e;
    const u16* of_token = keys + offset(token, a.keys_n) + 8 * at.t;
    tokens.keys[e][0] = load16<0>(of_token, token < at.end);
    tokens.keys[e][1] = load16<64>(of_token, token < at.end);
    tokens.keys[e][2] = load16<128>(of_token, token < at.end);
    tokens.keys[e][3] = load16<192>(of_token, token < at.end);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = first + 4 * at.t + i;
    const u16* of_token = values + offset(token, a.values_n) + 8 * at.g;
    tokens.values[0][i] = load16<0>(of_token, token < at.end);
    tokens.values[1][i] = load16<128>(of_token, token < at.end);
  }
}

struct Output {
  MaxSum total;                                           // of query head g
  float sums[16][2];                                      // [channels' product][columns 2 t, 2 t + 1]
};

DEVICE void attend_page(Output& out, const PageTokens& page, const Shared& s, const Place& at, int first, float scale) {
  float c[2][4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Words4 q = {{0, 0, 0, 0}};
    if (at.g < GROUP) q = *(const Words4*)&s.query[at.g][(4 * i + at.t) * 8];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      multiply_bf16(c[e], q.x[0], q.x[1], page.keys[e][i].x[0], page.keys[e][i].x[1]);
      multiply_bf16(c[e], q.x[2], q.x[3], page.keys[e][i].x[2], page.keys[e][i].x[3]);
    }
  }
  float weight[4], top = out.total.max;                   // of tokens 4 t to 4 t + 3
#pragma unroll
  for (int i = 0; i < 4; i++) {
    weight[i] = first + 4 * at.t + i < at.end ? c[i >> 1][i & 1] * scale : LOW;
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
    const Words4* v = page.values[n / 8];
    const int word = n % 8 / 2;
    const u32 half = n & 1 ? 0x7632 : 0x5410;
    float sums[4] = {out.sums[n][0] * decay, out.sums[n][1] * decay, 0.f, 0.f};
    multiply_bf16(sums, a0, a2, permute_bytes(v[0].x[word], v[1].x[word], half), permute_bytes(v[2].x[word], v[3].x[word], half));
    out.sums[n][0] = sums[0], out.sums[n][1] = sums[1];
  }
}

// Attend to this block's pages, a warp a page.
DEVICE void attend(Shared& s, const Arguments& a, const Place& at, const Choice& choice, Output& out) {
  const u16* keys = a.keys + at.row * a.keys_b + at.head * a.keys_h;
  const u16* values = a.values + at.row * a.values_b + at.head * a.values_h;
  wait_barrier(&s.barriers[CHOICE], 0);
  MARK(Stage::LIST);
  const int own = at.rank < choice.count ? (choice.count - at.rank + CLUSTER - 1) / CLUSTER : 0;
  choose_candidates(s, at, choice);                       // before the loads, behind which shared memory would wait
  sync_block();
  MARK(Stage::RANK);
#pragma unroll 1
  for (int n = at.warp; n < own; n += WARPS) {
    const int first = at.start + s.pages[n] * PAGE;
    PageTokens tokens;
    load_page(tokens, a, at, keys, values, first);
    attend_page(out, tokens, s, at, first, a.scale * LOG2_E);
  }
}

// Merge the warps' outputs and send each block its share.
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

// The selection in ascending order, and the counts; the first block, while the outputs are on their way.
DEVICE void write_selection(const Shared& s, const Arguments& a, const Place& at, const Choice& choice) {
  int* indices = a.block_indices + (long long)at.pair * a.max_blocks;
#pragma unroll 1
  for (int i = at.tid; i < a.max_blocks; i += THREADS) {
    if (i >= choice.count) {
      indices[i] = -1;
      continue;
    }
    const int page = s.chosen[i];
    int before = 0;
#pragma unroll 1
    for (int j = 0; j < choice.count; j += 16)            // NO_PAGE after the last
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const Words4 four = *(const Words4*)&s.chosen[j + 4 * k];
        before += ((int)four.x[0] < page) + ((int)four.x[1] < page) + ((int)four.x[2] < page) + ((int)four.x[3] < page);
      }
    indices[before] = page;
  }
  if (at.tid == 0) {
    a.block_counts[at.pair] = choice.count;
    if (a.counter) {
      const int missing = at.row_pages * PAGE - at.length;  // of the newest page, which is always read
      add_global(a.counter, (u64)max(choice.count * PAGE - missing, 0));
      add_global(a.counter + 1, (u64)at.length);
      if (at.row_pages > 0) add_global(a.counter + 2, (u64)at.row_pages * (2 * HEAD_DIM + 1) + HEAD_DIM);
      if (at.pair == 0) add_global(a.counter + 3, 1);
    }
  }
}

DEVICE void write_output(Shared& s, const Arguments& a, const Place& at) {
  wait_barrier(&s.barriers[OUTPUT], 0);
  MARK(Stage::MERGE);
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
    a.out[head * HEAD_DIM + channel] = (u16)to_bf16x2(total > 0.f ? sum / total : 0.f, 0.f);
    if (channel == 0) a.lse[head] = total > 0.f ? (top + log2_fast(total)) * LN_2 : as_float(MINUS_INFINITY);
  }
}

KERNEL(quest_step)(const Arguments a) {
  u8* memory = dynamic_shared();
  Shared& s = *(Shared*)memory;
  const int stride = a.local_pages + 8;                   // other banks for each head
  static_assert(sizeof(Shared) <= FIXED_BYTES, "what follows has a place of its own");
  float* scores = (float*)(memory + FIXED_BYTES);
  u32* word_counts = (u32*)(scores + GROUP * stride);
  Words4* quads = (Words4*)scores;                        // after the choice

  Place at;
  at.tid = thread_index(), at.lane = at.tid % 32, at.warp = at.tid / 32, at.g = at.lane / 4, at.t = at.lane % 4;
  at.rank = cluster_rank(), at.row = block_y(), at.head = block_x() / CLUSTER, at.pair = at.row * a.kv_heads + at.head;
  if (at.tid == 0) {
    for (int i = 0; i < BARRIERS; i++) init_barrier(&s.barriers[i]);
    publish_barriers();
  }
  sync_warp();
  arrive_cluster();
  const Bounds bounds = bounds_of(a, at);
  wait_for_previous_kernel();
  let_next_kernel_start();
  MARK(Stage::START);
  score_pages(s, a, bounds, at, scores, stride);
  MARK(Stage::SCORES);
  exchange_lse(s, at);
  MARK(Stage::EXCHANGE);
  const Choice choice = choose(s, a, at, scores, stride, word_counts);
  Output out = {MaxSum{LOW, 0.f}, {}};
  attend(s, a, at, choice, out);
  MARK(Stage::ATTEND);
  send_output(s, at, out, quads);
  if (at.rank == 0) write_selection(s, a, at, choice);
  write_output(s, a, at);
  MARK(Stage::WRITE);
}
