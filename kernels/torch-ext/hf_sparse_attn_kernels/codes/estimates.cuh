// Estimates of scores by products of bits, after bits.cuh. Macros: PRESENT, the query heads of a group; GROUP, at least as
// many; COLUMNS (4 or 8), the numbers of a page, with those of absent heads; DOUBLINGS, how often the channels that meet a
// bit of a byte are doubled, four bits for each; UNITS_OF_BIT, the units of a bit's product that slopes are for.
//
// `s` is a kernel's struct of shared memory, `at` its struct of places, `a` that of its arguments; the members that a
// function reads have the same names in all kernels.

constexpr float MOST_LOGARITHM = 100.f;                   // of a provisional weight, to the base of 2: no sum overflows

struct Query {
  u32 planes[GROUP][PLANES][BYTES / 4];                   // of the rotated query, like codes
  float slope[GROUP], half_sum[GROUP];                    // half of the sum of the rotated query
};

// Undo the doublings of a head, and store the planes of its bits.
template <class Arguments, class Place>
DEVICE void split_query(Query& query, const Arguments& a, const Place& at, int h) {
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
    if (at.lane < BYTES / 4) query.planes[h][p][at.lane] = plane;
  }
  if (at.lane == 0) {
    query.slope[h] = h < PRESENT ? a.slopes[head] * (float)UNITS_OF_BIT : 0.f;
    query.half_sum[h] = 0.5f * (float)sum;
  }
}

// A number for each of a lane's heads.
typedef float OfHeads[SETS][LANE_HEADS];

struct Head { OfHeads slope, half_sum; };

DEVICE void load_head(Head& head, const Query& query, int t) {
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
      const int h = head_of(set, j, t);
      head.slope[set][j] = h < GROUP ? query.slope[h] : 0.f;
      head.half_sum[set][j] = h < GROUP ? query.half_sum[h] : 0.f;
    }
}

// The products of the query and a page's centre, of a lane's heads: -inf for absent heads.
struct Centre { float of[SETS][2]; };

DEVICE void load_centre(Centre& c, const float* page_scores, int t, int page, bool exists) {
  const float* of_page = page_scores + (long long)page * COLUMNS;
#pragma unroll
  for (int set = 0; set < SETS; set++)
    if (LANE_HEADS == 2)
      load8(c.of[set], of_page + 4 * set + 2 * (t % 2), exists);
    else
      load4(*(u32*)&c.of[set][0], of_page + head_of(set, 0, t), exists);
}

// The estimates of a lane's two tokens, without their offsets, for the heads of a set.
DEVICE void estimate(float (&z)[2][LANE_HEADS], const u32 (&words)[4], const float (&factor)[2], const Planes& planes,
                     const Head& head, const Centre* const (&centre)[2], int set, int t) {
  int v[2][LANE_HEADS];
  multiply_planes(v, words, planes.bits[set], t);
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
      const float sum = as_float(v[r][j]) - as_float(WHOLE_FLOAT) - head.half_sum[set][j];   // exact
      z[r][j] = fmaf(sum * head.slope[set][j], factor[r], centre[r]->of[set][j]);
    }
}

// The estimates of a token, with its offset, for one or two heads, as float16.
DEVICE u32 with_offset(const float (&z)[LANE_HEADS], u32 factors, float offset_scale) {
  const float offset = half(factors >> 16);
  return to_half2_below_infinity(fmaf(offset, offset_scale, z[0]), fmaf(offset, offset_scale, z[LANE_HEADS - 1]));
}
