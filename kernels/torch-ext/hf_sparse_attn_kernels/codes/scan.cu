// The scan of the codes. Rounded like scan_codes_kernel in scan.py; for head_dim 128, pages of 64 tokens, and codes of one
// bit with offsets. Compiled with _cluster.cuh, codes/bits.cuh and codes/estimates.cuh before it and their macros, and
// these: THREADS of a block; BLOCKS that a multiprocessor has registers for; AHEAD, the pages that a warp loads ahead;
// RESULT, what it finds of a token, one of those below; FIXED_BYTES of shared memory.
//
// A block has pages that follow one another, and its warps take turns. No bit is unpacked: see bits.cuh.

constexpr int GREATEST = 0;                               // the greatest estimate of the group's heads
constexpr int ESTIMATES = 1;                              // those of all heads, and each head's log-sum-exp, for softmax
constexpr int PROVISIONAL = 2;                            // the sum of the heads' weights, with stand-ins for these

struct Arguments {
  const u8* codes;                                        // [pairs, max_pages * PAGE, BYTES]
  const u32* factors;                                     // [pairs, max_pages * PAGE] of two float16
  const s8* parts;                                        // [pairs, COLUMNS, HEAD_DIM]: the rotated query, doubled
  const float* slopes;                                    // [pairs, COLUMNS]
  const float* page_scores;                               // [pairs, max_pages, COLUMNS]
  const int *seq_start, *seq_end;
  u16* scores;                                            // float16 [pairs, num_tokens], not for ESTIMATES
  u32* estimates;                                         // [pairs, num_tokens, COLUMNS / 2] of two float16, ESTIMATES
  float* block_lse;                                       // [pairs, blocks, COLUMNS], not for GREATEST
  float* stand_ins;                                       // [pairs, COLUMNS], for PROVISIONAL
  int kv_heads, max_pages, num_tokens, first_page, block_pages;
  float offset_scale;
};

constexpr u32 ABSENT = 0xFC00;                            // -inf
constexpr int STAND_INS = 3;

struct Place {
  int tid, lane, warp, g, t;                              // lane = 4 g + t, as the tensor cores number rows and columns
  int pair;
};

struct Shared {
  Query query;
  MaxSum warp_lse[WARPS][HEADS];
  MaxSum stand_ins[STAND_INS][HEADS];                     // for PROVISIONAL: what is added up
};

// Estimates of a lane's heads and its tokens of a page.
typedef float Estimates[SETS][LANE_HEADS][4];

// Estimate the scores of a page; `packed` has those of one or two heads as float16.
DEVICE void estimate_page(Estimates& z, u32 (&packed)[SETS][4], const Arguments& a, const Place& at, const Codes& codes,
                          const Centre& centre, const Planes& planes, const Head& head) {
  const Centre* const centres[2] = {&centre, &centre};
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const float factor[2] = {half(codes.factors[k][0]), half(codes.factors[k][1])};
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      float found[2][LANE_HEADS];
      estimate(found, codes.words[k], factor, planes, head, centres, set, at.t);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 both = packed[set][2 * k + r] = with_offset(found[r], codes.factors[k][r], a.offset_scale);
#pragma unroll
        for (int j = 0; j < LANE_HEADS; j++) z[set][j][2 * k + r] = half(both >> (16 * j));
      }
    }
  }
}

DEVICE void clear_lse(LaneLse& lse) {
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) lse[set][j] = MaxSum{LOW, 0.f};
}

// Find a stand-in for the log-sum-exp of each of a lane's heads, which no block knows before all have ended: that of the
// first and of the last coded page, where most of a head's weight may lie, and of 32 other pages' centres. All blocks of a
// pair find the same.
DEVICE void find_stand_ins(OfHeads& found, Shared& s, const Arguments& a, const Place& at, const Planes& planes,
                           const Head& head, const float* page_scores, int pages) {
#pragma unroll 1
  for (int part = at.warp; part < STAND_INS; part += WARPS) {
    if (part < 2) {
      const int page = part * (pages - 1);
      const long long first = ((long long)at.pair * a.max_pages + page) * PAGE;
      Codes codes = {};
      Centre centre = {};
      load_codes(codes, a.codes + first * BYTES + at.lane * 4, (const u8*)(a.factors + first + at.t / 2 * 8 + at.g), true);
      load_centre(centre, page_scores, at.t, page, true);
      Estimates z;
      u32 packed[SETS][4];
      LaneLse lse;
      clear_lse(lse);
      estimate_page(z, packed, a, at, codes, centre, planes, head);
      add_exponentials(lse, z);
      store_warp_lse(s.stand_ins[part], lse, at.lane);
      continue;
    }
    const float* of_page = page_scores + (long long)at.lane * pages / 32 * COLUMNS;
    const float tokens = log2_fast((float)PAGE / 32.f * (float)pages);   // that each of them stands for
#pragma unroll
    for (int h = 0; h < PRESENT; h++) {
      MaxSum sum{of_page[h] + tokens, 1.f};
#pragma unroll
      for (int mask = 1; mask < 32; mask *= 2)
        sum = merge(sum, MaxSum{shuffle_xor(sum.max, mask), shuffle_xor(sum.sum, mask)});
      if (at.lane == 0) s.stand_ins[part][h] = sum;
    }
  }
  sync_block();
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
      const int h = min(head_of(set, j, at.t), PRESENT - 1);
      const MaxSum all = merge(merge(s.stand_ins[0][h], s.stand_ins[1][h]), s.stand_ins[2][h]);
      found[set][j] = all.max + log2_fast(fmaxf(all.sum, 1e-30f));
    }
}

// The greatest estimates of a page's tokens, of which this lane keeps two.
DEVICE void find_greatest(float (&mine)[2], const Arguments& a, const Place& at, const Codes& codes, const Centre& centre,
                          const Planes& planes, const Head& head) {
  const Centre* const centres[2] = {&centre, &centre};
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const float factor[2] = {half(codes.factors[k][0]), half(codes.factors[k][1])};
    float best[2];
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      float z[2][LANE_HEADS];
      estimate(z, codes.words[k], factor, planes, head, centres, set, at.t);
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < LANE_HEADS; j++) best[r] = set + j == 0 ? z[r][j] : fmaxf(best[r], z[r][j]);
    }
    mine[k] = score_of_lane(best, codes.factors[k], a.offset_scale, at.t);
  }
}

// The provisional scores of a page's tokens, of which this lane keeps two.
DEVICE void find_provisional(float (&mine)[2], const Estimates& z, const OfHeads& stand_ins, int t) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    float weight[2] = {};
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < LANE_HEADS; j++)
          weight[r] += exp2_fast(fminf(z[set][j][2 * k + r] - stand_ins[set][j], MOST_LOGARITHM));
    mine[k] = log2_fast((t % 2 ? weight[1] : weight[0]) + shuffle_xor(t % 2 ? weight[0] : weight[1], 1));
  }
}

// Estimate the scores of a page, and store what is found.
DEVICE void score_page(const Arguments& a, const Place& at, const Codes& codes, const Centre& centre,
                       const Planes& planes, const Head& head, const OfHeads& stand_ins, int page, u16* scores,
                       u32* estimates, LaneLse& lse) {
  const int u = at.t % 2, first = page * PAGE + at.t / 2 * 8 + at.g;       // and 16 more in row 1, and 32 more
  float mine[2];
  if (RESULT == GREATEST) {
    find_greatest(mine, a, at, codes, centre, planes, head);
  } else {
    Estimates z;
    u32 packed[SETS][4];
    estimate_page(z, packed, a, at, codes, centre, planes, head);
    add_exponentials(lse, z);
    if (RESULT == ESTIMATES) {
#pragma unroll
      for (int set = 0; set < SETS; set++)
#pragma unroll
        for (int i = 0; i < 4; i++) estimates[(first + 16 * i) * (COLUMNS / 2) + 2 * set + u] = packed[set][i];
      return;
    }
    find_provisional(mine, z, stand_ins, at.t);
  }
  const u32 both = page < a.first_page ? ABSENT << 16 | ABSENT : to_finite_half2(mine[0], mine[1]);
  scores[first + 16 * u] = (u16)both, scores[first + 16 * u + 32] = (u16)(both >> 16);
}

// Store the log-sum-exp of the block's estimates.
DEVICE void store_lse(Shared& s, const Arguments& a, const Place& at, LaneLse& lse) {
  store_warp_lse(s.warp_lse[at.warp], lse, at.lane);
  sync_block();
  if (at.tid >= HEADS) return;
  MaxSum all = s.warp_lse[0][at.tid];
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) all = merge(all, s.warp_lse[warp][at.tid]);
  float* block_lse = a.block_lse + ((long long)at.pair * blocks_x() + block_x()) * COLUMNS;
  block_lse[at.tid] = all.max + log2_fast(fmaxf(all.sum, 1e-30f));
}

DEVICE void store_stand_ins(const Arguments& a, const Place& at, const OfHeads& stand_ins) {
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
      const int head = head_of(set, j, at.lane);
      if (head < PRESENT) a.stand_ins[(long long)at.pair * COLUMNS + head] = stand_ins[set][j];
    }
}

KERNEL(scan_codes)(const Arguments a) {
  Shared& s = *(Shared*)dynamic_shared();
  static_assert(sizeof(Shared) <= FIXED_BYTES, "the launch asks for so many");
  Place at;
  at.tid = thread_index(), at.lane = at.tid % 32, at.warp = at.tid / 32, at.g = at.lane / 4, at.t = at.lane % 4;
  at.pair = block_y();
  // The kernel before prepares the query, and has waited for those before it: bounds, codes and factors are final.
  const int row = at.pair / a.kv_heads, length = min(max(a.seq_end[row] - a.seq_start[row], 0), a.num_tokens);
  const int coded_pages = max(length - 1, 0) / PAGE, first_page = block_x() * a.block_pages;
  const int end_page = min(first_page + a.block_pages, coded_pages);
  constexpr int CODES_STEP = WARPS * PAGE * BYTES, FACTORS_STEP = WARPS * PAGE * 4;
  const long long first = ((long long)at.pair * a.max_pages + first_page + at.warp) * PAGE;
  const u8* codes = a.codes + first * BYTES + at.lane * 4;
  const u8* factors = (const u8*)(a.factors + first + at.t / 2 * 8 + at.g);
  Codes pages[AHEAD] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    load_codes(pages[i], codes + i * CODES_STEP, factors + i * FACTORS_STEP,
               first_page + at.warp + i * WARPS < end_page);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const float* page_scores = a.page_scores + (long long)at.pair * a.max_pages * COLUMNS;
  Centre centres[AHEAD] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    const int page = first_page + at.warp + i * WARPS;
    load_centre(centres[i], page_scores, at.t, page, page < end_page);
  }
  if (first_page < end_page)
#pragma unroll 1
    for (int h = at.warp; h < GROUP; h += WARPS) split_query(s.query, a, at, h);
  sync_block();
  Planes planes;
  load_planes(planes, s.query.planes, at.g, at.t);
  Head head;
  load_head(head, s.query, at.t);
  OfHeads stand_ins = {};
  if (RESULT == PROVISIONAL && first_page < end_page) {
    find_stand_ins(stand_ins, s, a, at, planes, head, page_scores, coded_pages);
    if (block_x() == 0 && at.warp == 0 && at.lane < 2) store_stand_ins(a, at, stand_ins);
  }
  LaneLse lse;
  clear_lse(lse);
  u16* scores = a.scores + (long long)at.pair * a.num_tokens;
  u32* estimates = a.estimates + (long long)at.pair * a.num_tokens * (COLUMNS / 2);
#pragma unroll 1
  for (int first_of_turn = first_page + at.warp; first_of_turn < end_page; first_of_turn += AHEAD * WARPS) {
    codes += AHEAD * CODES_STEP, factors += AHEAD * FACTORS_STEP;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int page = first_of_turn + i * WARPS, next = page + AHEAD * WARPS;
      if (page < end_page)
        score_page(a, at, pages[i], centres[i], planes, head, stand_ins, page, scores, estimates, lse);
      load_codes(pages[i], codes + i * CODES_STEP, factors + i * FACTORS_STEP, next < end_page);
      load_centre(centres[i], page_scores, at.t, next, next < end_page);
    }
  }
  if (RESULT != GREATEST && first_page < end_page) store_lse(s, a, at, lse);
  if (RESULT == ESTIMATES) return;
  const int stop = min((first_page + a.block_pages) * PAGE, a.num_tokens);
#pragma unroll 1
  for (int i = max(first_page, coded_pages) * PAGE + at.tid; i < stop; i += THREADS) scores[i] = (u16)ABSENT;
}
