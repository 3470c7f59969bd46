// Scores of pages of keys by bounds in 8 bits, in kernels on thread-block clusters, after _cluster.cuh and _cluster_step.cuh:
// every block scores tiles of 16 pages in turn. Macros: CLUSTER, THREADS, GROUP, REDUCE (0: softmax, 1: mean, 2: max).
//
// `s`, `at` and `a` are as in _cluster_step.cuh. A kernel scores the page of the new token, at.last_page, itself.

constexpr int TILE = 16;
constexpr int SETS = (GROUP + 3) / 4;                     // products of a tile: each has eight columns, two a query head
constexpr int ELEMENTS = (GROUP * HEAD_DIM + THREADS - 1) / THREADS;
constexpr u32 FORCED = 0xFFFFFFFEu;                      // keys from here on are of pages read whatever they score

DEVICE float power_of_two(int exponent) { return as_float((u32)(exponent + 127) << 23); }
DEVICE float clamp(float x, float low, float high) { return fmaxf(fminf(x, high), low); }

// The smallest e with x <= (1 + fraction / 2**23) * 64 * 2**e.
DEVICE int exponent_for(float x, u32 fraction) {
  const u32 bits = as_bits(x);
  return (int)(bits >> 23) - 133 + ((bits & 0x7FFFFF) > fraction);
}

// The page of a block's `local` one: tiles go to the blocks by turns.
template <class Place>
DEVICE int page_of(const Place& at, u32 local) { return ((local / TILE) * CLUSTER + at.rank) * TILE + local % TILE; }

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

template <class Arguments, class Place>
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

template <class Arguments, class Place>
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
// `scale_query` comes first; between the two, and after them, the block's threads wait for each other.
template <class Shared, class Place>
DEVICE void scale_query(Shared& s, const Place& at, const QueryParts& parts, float (&scaled)[ELEMENTS]) {
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
}

template <class Shared, class Arguments, class Place>
DEVICE void split_query(Shared& s, const Arguments& a, const Place& at, const float (&scaled)[ELEMENTS]) {
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
}

// Scores of the tiles of a warp, and their log-sum-exp. A lane has query heads t and t + 4 of pages g and g + 8.
template <class Place>
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

// Score this block's tiles, of which the first two of each warp have been loaded.
template <class Shared, class Place>
DEVICE void score_tiles(Shared& s, const Bounds& bounds, Tile (&tiles)[2], const Place& at, float* scores, int stride) {
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
    if (at.g == 0 && 4 * set + at.t < GROUP) s.warp_lse[1 + at.warp][4 * set + at.t] = lse[set];
  }
}

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
template <int BINS>
DEVICE int bin_of(u32 key, float top) {
  if (key >= FORCED) return 0;
  const float score = as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
  const u32 bits = as_bits(fmaxf(top - score, 0.f) + 1.f) - 0x3F800000u;
  return (int)min(bits >> 17, (u32)BINS - 1);
}

// Load the log-sum-exps, or greatest scores, of all heads, and return a score that no page exceeds but by rounding.
template <class Shared>
DEVICE float load_lse(const Shared& s, float (&lse)[GROUP]) {
  float top = REDUCE == 2 ? LOW : 0.f;
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    lse[h] = s.lse[h];
    top = REDUCE == 1 ? top + lse[h] / GROUP : fmaxf(top, lse[h]);
  }
  if (REDUCE != 1 && GROUP == 1) top = lse[0];
  if (REDUCE == 0 && GROUP > 1) top = log2_fast((float)GROUP);
  return top;
}

// A page's tokens, or a part of them, for `load_tokens`.
struct Page {
  const u16 *keys, *values;                               // of the row's buffers and the KV head
  u32 keys_n, values_n;
  int first, end;

  DEVICE bool exists(int i) const { return first + i < end; }
  DEVICE const u16* key(int i) const { return keys + offset(first + i, keys_n); }
  DEVICE const u16* value(int i) const { return values + offset(first + i, values_n); }
};

// Keys and values of a page to the L2 cache, where they are one piece.
template <int PAGE, class Arguments, class Place>
DEVICE void prefetch_page(const Arguments& a, const Place& at, int page) {
  const int first = at.start + page * PAGE, bytes = min(PAGE, a.capacity - first) * HEAD_DIM * 2;
  if (a.keys_n != HEAD_DIM || a.values_n != HEAD_DIM) return;
  prefetch_l2(a.keys + at.row * a.keys_b + at.head * a.keys_h + first * a.keys_n, bytes);
  prefetch_l2(a.values + at.row * a.values_b + at.head * a.values_h + first * a.values_n, bytes);
}
