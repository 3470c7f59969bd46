// The scan of the codes: scores by the greatest estimate of a group, or all heads' estimates, for softmax. Rounded like
// scan_codes_kernel in scan.py; for head_dim 128, pages of 64 tokens, and codes of one bit with offsets. Compiled with
// _cluster.cuh and codes/bits.cuh before it and these macros: THREADS of a block; BLOCKS that a multiprocessor has
// registers for; AHEAD, the pages that a warp loads ahead; PRESENT (1 to 8), the query heads of a group; COLUMNS (4 or
// 8), the numbers of a page or token, with those of absent heads; GROUP: PRESENT, or for softmax at least 3; SOFTMAX (0
// or 1); DOUBLINGS, how often the channels that meet a bit of a byte are doubled, four bits for each; UNITS_OF_BIT, the
// units of a bit's product that slopes are for; FIXED_BYTES of shared memory.
//
// A block has pages that follow one another, and its warps take turns. No bit is unpacked: see bits.cuh.

struct Arguments {
  const u8* codes;                                        // [pairs, max_pages * PAGE, BYTES]
  const u32* factors;                                     // [pairs, max_pages * PAGE] of two float16
  const s8* parts;                                        // [pairs, COLUMNS, HEAD_DIM]: the rotated query, doubled
  const float* slopes;                                    // [pairs, COLUMNS]
  const float* page_scores;                               // [pairs, max_pages, COLUMNS]
  const int *seq_start, *seq_end;
  u16* scores;                                            // float16 [pairs, num_tokens], not for SOFTMAX
  u32* estimates;                                         // [pairs, num_tokens, COLUMNS / 2] of two float16, SOFTMAX
  float* block_lse;                                       // [pairs, blocks, COLUMNS], for SOFTMAX
  int kv_heads, max_pages, num_tokens, first_page, block_pages;
  float offset_scale;
};

constexpr u32 ABSENT = 0xFC00;                            // -inf

struct Place {
  int tid, lane, warp, g, t;                              // lane = 4 g + t, as the tensor cores number rows and columns
  int pair;
};

struct Shared {
  u32 planes[GROUP][PLANES][BYTES / 4];                   // of the rotated query, like codes
  float slope[GROUP], half_sum[GROUP];                    // half of the sum of the rotated query
  MaxSum warp_lse[WARPS][HEADS];
};

// Undo the doublings of a head, and store the planes of its bits.
DEVICE void split_query(Shared& s, const Arguments& a, const Place& at, int h) {
  const long long head = (long long)at.pair * COLUMNS + h;
  const u32 word = h < PRESENT ? ((const u32*)(a.parts + head * HEAD_DIM))[at.lane] : 0;
  const int doublings = DOUBLINGS >> (at.lane / 4 * 4) & 15;   // channels 16 i + j meet bit i
  int w[4];
#pragma unroll
  for (int k = 0; k < 4; k++) w[k] = (int)(word << (24 - 8 * k)) >> 24 >> doublings;
  const int sum = warp_sum(w[0] + w[1] + w[2] + w[3]);
#pragma unroll
  for (int p = 0; p < PLANES; p++) {
    const bool bit[4] = {(w[0] >> p & 1) != 0, (w[1] >> p & 1) != 0, (w[2] >> p & 1) != 0, (w[3] >> p & 1) != 0};
    const u32 plane = pack(bit, at.lane);
    if (at.lane < BYTES / 4) s.planes[h][p][at.lane] = plane;
  }
  if (at.lane == 0) {
    s.slope[h] = h < PRESENT ? a.slopes[head] * (float)UNITS_OF_BIT : 0.f;
    s.half_sum[h] = 0.5f * (float)sum;
  }
}

// The products of the query and a page's centre, of a lane's heads: -inf for absent heads.
struct Centre { float of[SETS][2]; };

DEVICE void load_centre(Centre& c, const float* page_scores, const Place& at, int page, bool exists) {
  const float* of_page = page_scores + (long long)page * COLUMNS;
#pragma unroll
  for (int set = 0; set < SETS; set++)
    if (LANE_HEADS == 2)
      load8(c.of[set], of_page + 4 * set + 2 * (at.t % 2), exists);
    else
      load4(*(u32*)&c.of[set][0], of_page + head_of(set, 0, at.t), exists);
}

struct Head {
  float slope[SETS][LANE_HEADS], half_sum[SETS][LANE_HEADS];
};

// Estimate the scores of a page.
DEVICE void score_page(const Arguments& a, const Place& at, const Codes& codes, const Centre& centre,
                       const Planes& planes, const Head& head, int page, u16* scores, u32* estimates,
                       LaneLse& lse) {
  const int u = at.t % 2, first = page * PAGE + at.t / 2 * 8 + at.g;       // and 16 more in row 1, and 32 more
  float kept[SETS][LANE_HEADS][4], mine[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const float factor[2] = {half(codes.factors[k][0]), half(codes.factors[k][1])};
    float best[2];
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      int v[2][LANE_HEADS];
      multiply_planes(v, codes.words[k], planes.bits[set], at.t);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float z[LANE_HEADS];
#pragma unroll
        for (int j = 0; j < LANE_HEADS; j++) {
          const float sum = as_float(v[r][j]) - as_float(WHOLE_FLOAT) - head.half_sum[set][j];   // exact
          z[j] = fmaf(sum * head.slope[set][j], factor[r], centre.of[set][j]);
          best[r] = set + j == 0 ? z[j] : fmaxf(best[r], z[j]);
        }
        if (SOFTMAX) {
          const float offset = half(codes.factors[k][r] >> 16);
          const u32 both = to_half2_below_infinity(fmaf(offset, a.offset_scale, z[0]),
                                                   fmaf(offset, a.offset_scale, z[LANE_HEADS - 1]));
          estimates[(first + 32 * k + 16 * r) * (COLUMNS / 2) + 2 * set + u] = both;
#pragma unroll
          for (int j = 0; j < LANE_HEADS; j++) kept[set][j][2 * k + r] = half(both >> (16 * j));
        }
      }
    }
    mine[k] = score_of_lane(best, codes.factors[k], a.offset_scale, at.t);
  }
  if (!SOFTMAX) {
    const u32 both = page < a.first_page ? ABSENT << 16 | ABSENT : to_finite_half2(mine[0], mine[1]);
    scores[first + 16 * u] = (u16)both, scores[first + 16 * u + 32] = (u16)(both >> 16);
    return;
  }
  add_exponentials(lse, kept);
}

// Store the log-sum-exp of the block's estimates.
DEVICE void store_lse(Shared& s, const Arguments& a, const Place& at, LaneLse& lse) {
  store_warp_lse(s.warp_lse[at.warp], lse, at.lane);
  sync_block();
  if (at.tid >= COLUMNS) return;
  MaxSum all = s.warp_lse[0][at.tid];
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) all = merge(all, s.warp_lse[warp][at.tid]);
  float* block_lse = a.block_lse + ((long long)at.pair * blocks_x() + block_x()) * COLUMNS;
  block_lse[at.tid] = all.max + log2_fast(fmaxf(all.sum, 1e-30f));
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
    load_centre(centres[i], page_scores, at, page, page < end_page);
  }
  if (first_page < end_page)
#pragma unroll 1
    for (int h = at.warp; h < GROUP; h += WARPS) split_query(s, a, at, h);
  sync_block();
  Planes planes;
  load_planes(planes, s.planes, at.g, at.t);
  Head head;
  LaneLse lse;
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
      const int h = head_of(set, j, at.t);
      head.slope[set][j] = h < GROUP ? s.slope[h] : 0.f;
      head.half_sum[set][j] = h < GROUP ? s.half_sum[h] : 0.f;
      lse[set][j] = MaxSum{LOW, 0.f};
    }
  u16* scores = a.scores + (long long)at.pair * a.num_tokens;
  u32* estimates = a.estimates + (long long)at.pair * a.num_tokens * (COLUMNS / 2);
#pragma unroll 1
  for (int first_of_turn = first_page + at.warp; first_of_turn < end_page; first_of_turn += AHEAD * WARPS) {
    codes += AHEAD * CODES_STEP, factors += AHEAD * FACTORS_STEP;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int page = first_of_turn + i * WARPS, next = page + AHEAD * WARPS;
      if (page < end_page) score_page(a, at, pages[i], centres[i], planes, head, page, scores, estimates, lse);
      load_codes(pages[i], codes + i * CODES_STEP, factors + i * FACTORS_STEP, next < end_page);
      load_centre(centres[i], page_scores, at, next, next < end_page);
    }
  }
  if (SOFTMAX) {
    if (first_page < end_page) store_lse(s, a, at, lse);
    return;
  }
  const int stop = min((first_page + a.block_pages) * PAGE, a.num_tokens);
#pragma unroll 1
  for (int i = max(first_page, coded_pages) * PAGE + at.tid; i < stop; i += THREADS) scores[i] = (u16)ABSENT;
}
