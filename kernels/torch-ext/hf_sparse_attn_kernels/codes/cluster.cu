// KeyCodes' decode step in one launch: a cluster of CLUSTER blocks for each row and KV head appends the token, estimates
// the scores of all coded tokens, chooses among them, attends and merges, and codes the page that the token has filled.
// Compiled with _cluster.cuh, codes/bits.cuh, _cluster_step.cuh and codes/choice.cuh before it and these macros: CLUSTER
// (2 to 16), THREADS (of a block, 256 or 512), BLOCKS (that a multiprocessor has registers for), GROUP (1 to 8), REDUCE
// (0: softmax, 2: max), LEAST_SQUARES (0 or 1: the factor of a page's codes), FIXED_BYTES (set apart for Shared); for
// benchmarks CLOCKS, see MARK.
//
// Each block has pages that follow one another, so that the chosen tokens of the blocks in turn are in ascending order.
// The product of a code and a rotated query, in whole numbers of 6 bits, is the sum over the planes of the query's bits
// of the bits that both have: products of bits on the tensor cores.

struct Arguments {
  const u16 *query, *new_key, *new_value;                          // bf16
  u16 *keys, *values;                                              // bf16
  u8* codes;                                                       // [pairs, max_pages * PAGE, 16]
  u32* factors;                                                    // [pairs, max_pages * PAGE] of two float16
  s8* centres;                                                     // [pairs, max_pages, HEAD_DIM]
  u16* centre_scale;                                               // float16 [pairs, max_pages]
  int* coded;                                                      // [pairs]
  const float* query_centre;                                       // [pairs, HEAD_DIM]
  const s8* signs;                                                 // [HEAD_DIM]: of the rotation's first row
  const int *seq_start, *seq_end;
  u64* counter;                                                    // [4], or null
  u16* out;                                                        // bf16 [batch, q_heads, HEAD_DIM]
  float* lse;                                                      // [batch, q_heads]
  int* block_indices;                                              // [batch, kv_heads, max_tokens]
  int* block_counts;                                               // [batch, kv_heads]
  long long query_b, query_h, query_d, new_key_b, new_key_h, new_value_b, new_value_h;  // strides, in elements
  long long keys_b, keys_h, keys_n, values_b, values_h, values_n;
  int kv_heads, max_pages, num_tokens, max_tokens, sink_tokens;
  int local_pages;                                                 // most pages of a block
  float scale, score_scale, offset_scale;                          // of attention, of estimates, of offsets
};

constexpr int UNITS = 16256, ROTATED_UNITS = 31;
constexpr bool SOFTMAX = REDUCE == 0 && GROUP > 1;
constexpr int AHEAD = GROUP > 4 ? 3 : 4;                  // pages that a warp loads ahead
constexpr int MOST_READ = 4096, MOST_EACH = (MOST_READ / 16 + CLUSTER - 1) / CLUSTER * 16;
constexpr float ROTATION = 0.08838834764831845f;          // magnitude of the rotation's elements
constexpr float MOST_HALF = 65504.f, LEAST_HALF = 0.00006103515625f;

enum class Stage { START, QUERY, CENTRES, SCAN, EXCHANGE, KEYS, EDGE, LIST, ATTEND, MERGE, WRITE, CODE };  // STAGES in cluster.py

struct Shared {
  Choice choice;
  Words4 output_in[CLUSTER][QUADS_EACH];
  alignas(16) s8 parts[8 * SETS][HEAD_DIM];               // the query in whole numbers: of each head 128ths, and the rest
  alignas(16) u16 query[GROUP][HEAD_DIM + 8];
  alignas(16) u32 planes[GROUP][PLANES][BYTES / 4];       // of the rotated query, like codes
  u64 barriers[BARRIERS];
  MaxSum warp_lse[WARPS][GROUP], lse_in[CLUSTER][GROUP], warp_output[WARPS][GROUP], sums_in[CLUSTER][GROUP];
  float centre_unit[GROUP], slope[GROUP], lse[GROUP];
  int sum[GROUP];                                         // of the rotated query
  int tokens[MOST_EACH];                                  // that this block attends to
};

struct Place {
  int tid, lane, warp, g, t;                              // lane = 4 g + t, as the tensor cores number rows and columns
  int rank, pair, row, head;
  int start, end, length;
  int candidates, scored;                                 // tokens of the row that may be chosen: coded ones, all
  int first_page, pages;                                  // of this block
};

// ---- the query

DEVICE int whole(float x, float unit) { return (int)floorf(x / unit + 0.5f); }
DEVICE float half_round_up(float x) { return floorf(x + 0.5f); }

// A Hadamard transform over the channels of a warp, four a lane.
template <class Number>
DEVICE void transform(Number (&x)[4], int lane) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const Number a = x[i], b = x[i + 1];
    x[i] = a + b, x[i + 1] = a - b;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Number a = x[i], b = x[i + 2];
    x[i] = a + b, x[i + 2] = a - b;
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Number other = shuffle_xor(x[i], mask);
      x[i] = lane & mask ? other - x[i] : x[i] + other;
    }
}

DEVICE float greatest(const float (&x)[4]) {
  const float most = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
  return as_float(warp_max(as_bits(most)));
}

struct Query {
  u16 x[4];                                               // of a warp's head, channels 4 lane to 4 lane + 3
  float centre[4];
  int sign[4];
};

DEVICE Query load_query(const Arguments& a, const Place& at, int h) {
  Query q;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int d = 4 * at.lane + i;
    q.x[i] = a.query[at.row * a.query_b + (at.head * GROUP + h) * a.query_h + d * a.query_d];
    q.centre[i] = a.query_centre[at.pair * HEAD_DIM + d];
    q.sign[i] = a.signs[d];
  }
  return q;
}

// Round the query less its centre to whole numbers, rotate it, round it again, and store the planes of its bits.
DEVICE void rotate_query(Shared& s, const Arguments& a, const Place& at, const Query& q, int h) {
  float x[4];
  int w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = bf16(q.x[i]) - q.centre[i];
  const float unit = fmaxf(greatest(x), 1e-30f) * (float)(1.0 / UNITS);
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = whole(x[i], unit) * q.sign[i];
  transform(w, at.lane);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = (float)w[i];         // exact
  const float rotated_unit = fmaxf(greatest(x), 1.f) * (float)(1.0 / ROTATED_UNITS);
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = whole(x[i], rotated_unit);
  const int sum = warp_sum(w[0] + w[1] + w[2] + w[3]);
#pragma unroll
  for (int p = 0; p < PLANES; p++) {
    const bool bit[4] = {(w[0] >> p & 1) != 0, (w[1] >> p & 1) != 0, (w[2] >> p & 1) != 0, (w[3] >> p & 1) != 0};
    const u32 word = pack(bit, at.lane);
    if (at.lane < BYTES / 4) s.planes[h][p][at.lane] = word;
  }
  if (at.lane == 0) s.slope[h] = unit * rotated_unit * (a.score_scale * ROTATION), s.sum[h] = sum;
}

// Round the query to whole numbers of 14 bits, in two parts of 8.
DEVICE void split_query(Shared& s, const Arguments& a, const Place& at, const Query& q, int h) {
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = bf16(q.x[i]);
  const float unit = fmaxf(greatest(x), 1e-30f) * (float)(1.0 / UNITS);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int d = 4 * at.lane + i, w = whole(x[i], unit), high = (w + 64) >> 7;
    s.parts[2 * h][d] = (s8)high, s.parts[2 * h + 1][d] = (s8)(w - 128 * high);
    s.query[h][d] = q.x[i];
  }
  if (at.lane == 0) s.centre_unit[h] = unit * a.score_scale;
}

// ---- estimates

struct Centres {
  Words4 levels[2][2];                                    // [pages g, g + 8][channels 0 to 63, 64 to 127]
  u32 scale[2];
};

DEVICE void load_centres(Centres& c, const Arguments& a, const Place& at, int tile) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int local = tile * 16 + 8 * r + at.g;
    const long long page = (long long)at.pair * a.max_pages + at.first_page + local;
    const bool exists = local < at.pages;
    c.levels[r][0] = load16<0>(a.centres + page * HEAD_DIM + 16 * at.t, exists);
    c.levels[r][1] = load16<64>(a.centres + page * HEAD_DIM + 16 * at.t, exists);
    c.scale[r] = exists ? a.centre_scale[page] : 0;
  }
}

// The products of the queries and the centres of 16 pages.
DEVICE void score_centres(const Shared& s, const Centres& of, const Place& at, int tile, float* page_scores) {
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    int c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const Words4 part = *(const Words4*)&s.parts[8 * set + at.g][(4 * k + at.t) * 16];
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        multiply_s8(c, of.levels[0][k].x[i], of.levels[1][k].x[i], of.levels[0][k].x[i + 1], of.levels[1][k].x[i + 1],
                    part.x[i], part.x[i + 1]);
    }
    const int h = 4 * set + at.t;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int local = tile * 16 + 8 * r + at.g;
      float score = as_float(MINUS_INFINITY);
      if (h < GROUP) score = (float)(c[2 * r] * 128 + c[2 * r + 1]) * s.centre_unit[h] * half(of.scale[r]);
      if (h < HEADS && local < at.pages) page_scores[local * HEADS + h] = score;
    }
  }
}

// From sums over bits to products with symbols, of a lane's heads.
struct Linear { float slope[SETS][LANE_HEADS], level[SETS][LANE_HEADS]; };

DEVICE void load_linear(Linear& of, const Shared& s, const Place& at) {
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
      const int h = head_of(set, j, at.t);
      of.slope[set][j] = h < GROUP ? 2.f * s.slope[h] : 0.f;           // symbols are 2 bit - 1
      of.level[set][j] = h < GROUP ? -(float)s.sum[h] * s.slope[h] : 0.f;
    }
}

// Estimate the scores of a page: for the maximum store the keys, for softmax all estimates, and add up their exponentials.
DEVICE void score_page(Shared& s, const Arguments& a, const Place& at, const Codes& page, const Planes& planes,
                       const Linear& linear, int local, const float* page_scores, u16* keys, u32* estimates,
                       LaneLse& lse) {
  const int u = at.t % 2, first = local * PAGE + at.t / 2 * 8 + at.g;      // and 16 more in row 1, and 32 more
  float centre[SETS][LANE_HEADS], kept[SETS][LANE_HEADS][4], mine[2];
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++)
      centre[set][j] = page_scores[local * HEADS + head_of(set, j, at.t)];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const float factor[2] = {half(page.factors[k][0]), half(page.factors[k][1])};
    float best[2];
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      int v[2][LANE_HEADS];
      multiply_planes(v, page.words[k], planes.bits[set], at.t);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float z[LANE_HEADS];
#pragma unroll
        for (int j = 0; j < LANE_HEADS; j++) {
          const float sum = as_float(v[r][j]) - as_float(WHOLE_FLOAT);
          z[j] = fmaf(fmaf(sum, linear.slope[set][j], linear.level[set][j]), factor[r], centre[set][j]);
          best[r] = set + j == 0 ? z[j] : fmaxf(best[r], z[j]);
        }
        if (SOFTMAX) {
          const float offset = half(page.factors[k][r] >> 16);
          const u32 both = to_half2_below_infinity(fmaf(offset, a.offset_scale, z[0]),
                                                   fmaf(offset, a.offset_scale, z[LANE_HEADS - 1]));
          const int token = first + 32 * k + 16 * r;
          if (LANE_HEADS == 2)
            estimates[(set * a.local_pages * PAGE + token) * 2 + u] = both;
          else
            ((u16*)estimates)[token * 2 + u] = (u16)both;
#pragma unroll
          for (int j = 0; j < LANE_HEADS; j++) kept[set][j][2 * k + r] = half(both >> (16 * j));
        }
      }
    }
    mine[k] = score_of_lane(best, page.factors[k], a.offset_scale, at.t);
  }
  if (!SOFTMAX) {
    const int token = first + 16 * u, sinks = a.sink_tokens - at.first_page * PAGE;
    const u32 both = keys_of(to_finite_half2(mine[0], mine[1]));
    u32 low = both & 0xFFFF, high = both >> 16;
    if (local * PAGE < sinks) {                           // the same for all
      low = token < sinks ? FORCED : low;
      high = token + 32 < sinks ? FORCED : high;
    }
    keys[token] = (u16)low, keys[token + 32] = (u16)high;
    count_key(s.choice, low), count_key(s.choice, high);
  }
  if (SOFTMAX) add_exponentials(lse, kept);
}

DEVICE void estimate(Shared& s, const Arguments& a, Place& at, float* page_scores, u16* keys, u32* estimates) {
  at.start = a.seq_start[at.row], at.end = a.seq_end[at.row];
  const int h = at.warp < WARPS / 2 ? at.warp : at.warp - WARPS / 2;   // half of the warps rotate, half split
  Query query = load_query(a, at, min(h, GROUP - 1));
  at.length = max(at.end - at.start, 0);
  at.scored = min(at.length, a.num_tokens);
  const int scored_pages = max(at.scored - 1, 0) / PAGE, each = (scored_pages + CLUSTER - 1) / CLUSTER;
  at.candidates = scored_pages * PAGE;
  at.first_page = min(at.rank * each, scored_pages);
  at.pages = min(each, scored_pages - at.first_page);

  Centres centres;
  load_centres(centres, a, at, at.warp);
  const long long first = ((long long)at.pair * a.max_pages + at.first_page) * PAGE;
  constexpr int CODES_STEP = WARPS * PAGE * BYTES, FACTORS_STEP = WARPS * PAGE * 4;
  const u8* codes = a.codes + (first + at.warp * PAGE) * BYTES + at.lane * 4;
  const u8* factors = (const u8*)(a.factors + first + at.warp * PAGE + at.t / 2 * 8 + at.g);
  Codes pages[AHEAD] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    load_codes(pages[i], codes + i * CODES_STEP, factors + i * FACTORS_STEP, at.warp + i * WARPS < at.pages);

  clear_counts(s.choice, at);
#pragma unroll 1
  for (int i = 2 * GROUP * HEAD_DIM + at.tid; i < 8 * SETS * HEAD_DIM; i += THREADS) s.parts[i / HEAD_DIM][i % HEAD_DIM] = 0;
#pragma unroll 1
  for (int n = h; n < GROUP; n += WARPS / 2) {
    if (n != h) query = load_query(a, at, n);
    if (at.warp < WARPS / 2)
      rotate_query(s, a, at, query, n);
    else
      split_query(s, a, at, query, n);
  }
  sync_block();
  MARK(Stage::QUERY);
#pragma unroll 1
  for (int tile = at.warp; tile * 16 < at.pages; tile += WARPS) {
    if (tile != at.warp) load_centres(centres, a, at, tile);
    score_centres(s, centres, at, tile, page_scores);
  }
  sync_block();
  MARK(Stage::CENTRES);

  Planes planes;
  load_planes(planes, s.planes, at.g, at.t);
  Linear linear;
  load_linear(linear, s, at);
  LaneLse lse;
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) lse[set][j] = MaxSum{LOW, 0.f};
#pragma unroll 1
  for (int n = at.warp; n < at.pages; n += AHEAD * WARPS) {
    codes += AHEAD * CODES_STEP, factors += AHEAD * FACTORS_STEP;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int local = n + i * WARPS;
      if (local < at.pages) score_page(s, a, at, pages[i], planes, linear, local, page_scores, keys, estimates, lse);
      load_codes(pages[i], codes + i * CODES_STEP, factors + i * FACTORS_STEP, local + AHEAD * WARPS < at.pages);
    }
  }
  if (SOFTMAX) store_warp_lse(s.warp_lse[at.warp], lse, at.lane);
}

// Reduce the estimates of two tokens over the heads: add up the weights, and store the keys of their natural logarithms.
DEVICE void reduce_tokens(Shared& s, const Arguments& a, const Place& at, const float (&lse)[GROUP], int local, u16* keys,
                          const u32* estimates) {
  float z[2][GROUP], score[2];
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (LANE_HEADS == 1) {
        const u32 word = estimates[local + i];
        z[i][0] = half(word), z[i][GROUP - 1] = half(word >> 16);
      } else {
        const Words2 words = *(const Words2*)&estimates[(set * a.local_pages * PAGE + local + i) * 2];
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (4 * set + j < GROUP) z[i][4 * set + j] = half(words.x[j / 2] >> (16 * (j % 2)));
      }
    }
#pragma unroll
  for (int i = 0; i < 2; i++) score[i] = log_of_weights(z[i], lse);
  u32 both = keys_of(to_finite_half2(score[0], score[1]));
  const int sinks = a.sink_tokens - at.first_page * PAGE;
  if (local < sinks) both &= 0xFFFF0000u;
  if (local + 1 < sinks) both &= 0x0000FFFFu;
  *(u32*)&keys[local] = both;
  count_key(s.choice, both & 0xFFFF), count_key(s.choice, both >> 16);
}

// ---- the choice

// Number n of the chosen tokens.
DEVICE void emit(Shared& s, const Arguments& a, const Place& at, int n, int token) {
  send((u32*)&s.tokens[n / CLUSTER], n % CLUSTER, (u32)token, &s.barriers[CHOICE]);
  a.block_indices[(long long)at.pair * a.max_tokens + n] = token;
}

// Choose tokens, and send number n of them to block n % CLUSTER; return their count.
DEVICE int choose(Shared& s, const Arguments& a, const Place& at, const u16* keys) {
  const int count = min(at.scored, a.max_tokens), newest = at.scored - at.candidates, need = count - newest;
  Among among;
  const Last last = find_last(s.choice, at, keys, need, s.barriers, among);
  MARK(Stage::EDGE);
  emit_chosen(s.choice, at, among, last, [&](int n, int place) { emit(s, a, at, n, at.first_page * PAGE + place); });
  if (at.rank == CLUSTER - 1 && at.tid < newest) emit(s, a, at, need + at.tid, at.candidates + at.tid);
  if (at.rank == 0) write_absent(a, at, count);
  if (at.tid == 0) arm_barrier(&s.barriers[CHOICE], 4 * (at.rank < count ? (count - at.rank + CLUSTER - 1) / CLUSTER : 0));
  return count;
}

// ---- attention

struct Rows {
  const int* tokens;                                      // shared memory
  const u16 *keys, *values, *new_key, *new_value;         // of the row's first token and the KV head
  u32 keys_n, values_n;
  int count, newest;

  DEVICE bool exists(int i) const { return i < count; }
  DEVICE const u16* key(int i) const { return tokens[i] == newest ? new_key : keys + offset(tokens[i], keys_n); }
  DEVICE const u16* value(int i) const { return tokens[i] == newest ? new_value : values + offset(tokens[i], values_n); }
};

DEVICE Rows rows_of(const Arguments& a, const Place& at) {
  const long long start = at.start;
  return Rows{0,
              a.keys + at.row * a.keys_b + at.head * a.keys_h + start * a.keys_n,
              a.values + at.row * a.values_b + at.head * a.values_h + start * a.values_n,
              a.new_key + at.row * a.new_key_b + at.head * a.new_key_h,
              a.new_value + at.row * a.new_value_b + at.head * a.new_value_h,
              (u32)a.keys_n, (u32)a.values_n, 0, at.length - 1};
}

// Attend to this block's tokens. The newest one is read from where it came, since another block stores it.
DEVICE void attend(Shared& s, const Arguments& a, const Place& at, int count, Output& out) {
  wait_barrier(&s.barriers[CHOICE], 0);
  sync_block();                                           // no keys are read any more
  MARK(Stage::LIST);
  const int own = at.rank < count ? (count - at.rank + CLUSTER - 1) / CLUSTER : 0;
  const int each = clamp((own + WARPS - 1) / WARPS, 1, 16);
  Rows rows = rows_of(a, at);
#pragma unroll 1
  for (int first = at.warp * each; first < own; first += WARPS * each) {
    rows.tokens = s.tokens + first, rows.count = min(each, own - first);
    Tokens tokens;
    load_tokens(tokens, rows, at);
    attend_tokens(out, tokens, s, at, rows.count, a.scale * LOG2_E);
  }
}

// ---- the token and its page

DEVICE void append(const Arguments& a, const Place& at) {
  const int d = at.lane * 4;
  const u16* new_key = a.new_key + at.row * a.new_key_b + at.head * a.new_key_h + d;
  const u16* new_value = a.new_value + at.row * a.new_value_b + at.head * a.new_value_h + d;
  u16* key = a.keys + at.row * a.keys_b + at.head * a.keys_h + (at.end - 1) * a.keys_n + d;
  u16* value = a.values + at.row * a.values_b + at.head * a.values_h + (at.end - 1) * a.values_n + d;
  *(Words2*)key = *(const Words2*)new_key;
  *(Words2*)value = *(const Words2*)new_value;
}

DEVICE void load_key(float (&key)[4], const u16* of_token, int lane) {
  const Words2 words = *(const Words2*)(of_token + 4 * lane);
#pragma unroll
  for (int i = 0; i < 4; i++) key[i] = bf16(words.x[i / 2] >> (16 * (i % 2)) & 0xFFFF);
}

// Code the page that the token has filled, unless it is coded already. `scratch` has room for WARPS * HEAD_DIM floats.
DEVICE void code_page(Shared& s, const Arguments& a, const Place& at, float* scratch) {
  const int page = at.length / PAGE - 1;
  if (at.length == 0 || at.length % PAGE || page >= a.max_pages || a.coded[at.pair] > page) return;  // of the whole block
  Rows rows = rows_of(a, at);
  float sum[4] = {}, key[4];
#pragma unroll 1
  for (int i = at.warp; i < PAGE; i += WARPS) {
    const int token = page * PAGE + i;
    load_key(key, token == rows.newest ? rows.new_key : rows.keys + offset(token, rows.keys_n), at.lane);
#pragma unroll
    for (int k = 0; k < 4; k++) sum[k] += key[k];
  }
#pragma unroll
  for (int k = 0; k < 4; k++) scratch[at.warp * HEAD_DIM + 4 * at.lane + k] = sum[k];
  sync_block();
  float mean[4] = {}, centre[4], query_centre[4];
  int sign[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int d = 4 * at.lane + k;
#pragma unroll
    for (int w = 0; w < WARPS; w++) mean[k] += scratch[w * HEAD_DIM + d];
    mean[k] *= 1.f / PAGE;
    query_centre[k] = a.query_centre[at.pair * HEAD_DIM + d];
    sign[k] = a.signs[d];
  }
  const long long of_page = (long long)at.pair * a.max_pages + page;
  const u32 scale_bits = to_finite_half2(fminf(fmaxf(greatest(mean) / 127.f, LEAST_HALF), MOST_HALF), 0.f) & 0xFFFF;
  const float scale = half(scale_bits);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float level = fminf(fmaxf(half_round_up(mean[k] / scale), -127.f), 127.f);
    centre[k] = level * scale;
    if (at.warp == 0) a.centres[of_page * HEAD_DIM + 4 * at.lane + k] = (s8)level;
  }
  if (at.tid == 0) a.centre_scale[of_page] = (u16)scale_bits, a.coded[at.pair] = page + 1;
#pragma unroll 1
  for (int i = at.warp; i < PAGE; i += WARPS) {
    const int token = page * PAGE + i;
    load_key(key, token == rows.newest ? rows.new_key : rows.keys + offset(token, rows.keys_n), at.lane);
    float squares = 0.f, along = 0.f, product = 0.f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      key[k] -= centre[k];
      squares += key[k] * key[k], product += key[k] * query_centre[k];
      key[k] *= (float)sign[k];
    }
    transform(key, at.lane);
    const bool bit[4] = {key[0] >= 0.f, key[1] >= 0.f, key[2] >= 0.f, key[3] >= 0.f};
    const u32 word = pack(bit, at.lane);
#pragma unroll
    for (int k = 0; k < 4; k++) along += fabsf(key[k]);
    along *= ROTATION;
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      squares += shuffle_xor(squares, mask), along += shuffle_xor(along, mask), product += shuffle_xor(product, mask);
    }
    const float wanted = LEAST_SQUARES ? along * (1.f / HEAD_DIM) : squares / along;
    const float factor = along > 0.f ? fminf(wanted, MOST_HALF) : 0.f;
    const long long of_token = of_page * PAGE + i;
    if (at.lane < BYTES / 4) ((u32*)a.codes)[of_token * (BYTES / 4) + at.lane] = word;
    if (at.lane == 0) a.factors[of_token] = to_finite_half2(factor, product * ROTATION);
  }
}

DEVICE void count_reads(const Arguments& a, const Place& at, int count) {
  add_global(a.counter, (u64)count);
  add_global(a.counter + 1, (u64)at.length);
  add_global(a.counter + 2, (u64)(at.candidates / PAGE) * (PAGE * (BYTES + 4) + HEAD_DIM + 2));
  if (at.pair == 0) add_global(a.counter + 3, 1);
}

KERNEL(key_codes_step)(const Arguments a) {
  u8* memory = dynamic_shared();
  Shared& s = *(Shared*)memory;
  static_assert(sizeof(Shared) <= FIXED_BYTES, "what follows has a place of its own");
  u16* keys = (u16*)(memory + FIXED_BYTES);
  float* page_scores = (float*)(keys + a.local_pages * PAGE);
  u32* estimates = (u32*)(page_scores + (a.local_pages * HEADS + 3) / 4 * 4);
  Words4* quads = (Words4*)keys;                          // after the choice

  Place at;
  at.tid = thread_index(), at.lane = at.tid % 32, at.warp = at.tid / 32, at.g = at.lane / 4, at.t = at.lane % 4;
  at.rank = cluster_rank(), at.row = block_y(), at.head = block_x() / CLUSTER, at.pair = at.row * a.kv_heads + at.head;
  if (at.tid == 0) {
    for (int i = 0; i < BARRIERS; i++) init_barrier(&s.barriers[i]);
    publish_barriers();
  }
  sync_warp();
  arrive_cluster();
  wait_for_previous_kernel();
  let_next_kernel_start();
  MARK(Stage::START);
  estimate(s, a, at, page_scores, keys, estimates);
  MARK(Stage::SCAN);
  if (SOFTMAX) {
    exchange_lse<true>(s, at);
    float lse[GROUP];
#pragma unroll
    for (int h = 0; h < GROUP; h++) lse[h] = s.lse[h];
    MARK(Stage::EXCHANGE);
#pragma unroll 2
    for (int local = 2 * at.tid; local < at.pages * PAGE; local += 2 * THREADS)
      reduce_tokens(s, a, at, lse, local, keys, estimates);
  } else {
    wait_cluster();                                       // all blocks run, and their barriers exist
    MARK(Stage::EXCHANGE);
  }
  MARK(Stage::KEYS);
  const int count = choose(s, a, at, keys);
  if (at.rank == CLUSTER - 1 && at.warp == WARPS - 1 && at.length > 0) append(a, at);
  Output out = {MaxSum{LOW, 0.f}, {}};
  attend(s, a, at, count, out);
  MARK(Stage::ATTEND);
  send_output(s, at, out, quads);
  if (at.rank == 0 && at.tid == 0) {
    a.block_counts[at.pair] = count;
    if (a.counter) count_reads(a, at, count);
  }
  wait_barrier(&s.barriers[OUTPUT], 0);
  MARK(Stage::MERGE);
  write_output(s, a, at);
  MARK(Stage::WRITE);
  if (at.rank == CLUSTER - 1) {
    sync_block();
    code_page(s, a, at, (float*)quads);
  }
  MARK(Stage::CODE);
}
