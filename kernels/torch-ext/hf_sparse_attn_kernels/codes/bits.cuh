// Products of codes of one bit and rotated queries of PLANES bits a channel, as products of bits on the tensor cores.
// After _cluster.cuh. Macro: GROUP (1 to 8), the query heads of a KV head.
//
// The sum of the product of a code's bits and a query in whole numbers is the sum over the planes of the query's bits of
// the bits that both have, each plane worth a power of two. A line of the codes' operand is two tokens, as they lie in
// memory; its columns are heads, and planes where the group is small.

constexpr int PAGE = 64, BYTES = HEAD_DIM / 8, PLANES = 6;
constexpr int SLOT_HEADS = GROUP < 3 ? GROUP : 4, SLOT_PLANES = 4 / SLOT_HEADS;  // of a product, for either token of a line
constexpr int SETS = (GROUP + 3) / 4, PRODUCTS = (PLANES + SLOT_PLANES - 1) / SLOT_PLANES;
constexpr int HEADS = SETS * SLOT_HEADS, LANE_HEADS = GROUP < 3 ? 1 : 2;         // with absent ones; of a lane and set
constexpr int WHOLE_FLOAT = 0x4B400000;                   // 1.5 * 2 ** 23: whole numbers added to its bits are floats

// A bit of every channel, four a lane, packed as codes are: bit i of byte j is that of channel 16 i + j. Lane t returns
// word t % 4.
DEVICE u32 pack(const bool (&bit)[4], int lane) {
  u32 word = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) {                           // lane 4 i + t has channels 16 i + 4 t + k
    u32 bits = warp_ballot(bit[k]) >> (lane & 3) & 0x11111111u;
    bits = (bits | bits >> 3) & 0x03030303u;
    bits = (bits | bits >> 6) & 0x000F000Fu;
    word |= ((bits | bits >> 12) & 0xFFu) << (8 * k);
  }
  return word;
}

// A lane's part of a page: of tokens 32 k + 16 r + 8 p + g the words t of their codes, [k][2 p + r] as the operand of a
// product has them; and of those with p = t / 2 the factors.
struct Codes {
  u32 words[2][4], factors[2][2];
};

DEVICE void load_codes(Codes& c, const u8* codes, const u8* factors, bool exists) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    load4(c.words[k][0], codes + 32 * BYTES * k, exists);
    load4(c.words[k][1], codes + 32 * BYTES * k + 16 * BYTES, exists);
    load4(c.words[k][2], codes + 32 * BYTES * k + 8 * BYTES, exists);
    load4(c.words[k][3], codes + 32 * BYTES * k + 24 * BYTES, exists);
    load4(c.factors[k][0], factors + 128 * k, exists);
    load4(c.factors[k][1], factors + 128 * k + 64, exists);
  }
}

// The bits of column g, word t, for either token of a line.
struct Planes { u32 bits[SETS][PRODUCTS][2]; };

// Head number j of those of a lane and set.
DEVICE int head_of(int set, int j, int t) { return GROUP == 1 ? 0 : GROUP == 2 ? t % 2 : 4 * set + 2 * (t % 2) + j; }

// Column g is that of token g / 4 of a line, with zeros for the other, and of head or plane g % 4.
DEVICE void load_planes(Planes& of, const u32 (&planes)[GROUP][PLANES][BYTES / 4], int g, int t) {
  const int slot = g % 4;
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int m = 0; m < PRODUCTS; m++) {
      const int h = 4 * set + slot / SLOT_PLANES, p = m * SLOT_PLANES + slot % SLOT_PLANES;
      const bool exists = h < GROUP && p < PLANES;
#pragma unroll
      for (int i = 0; i < 2; i++) of.bits[set][m][i] = exists && g / 4 == i ? planes[h][p][t] : 0;
    }
}

// The sums over the planes, the last one's bits being worth -2 ** 5, of a lane's two tokens, plus WHOLE_FLOAT: those of
// heads 2 (t % 2) and 2 (t % 2) + 1 of the set, or for GROUP 2 of head t % 2; for GROUP 1 of token t % 2 alone.
DEVICE void multiply_planes(int (&v)[2][LANE_HEADS], const u32 (&words)[4], const u32 (&bits)[PRODUCTS][2], int t) {
  if (SLOT_HEADS == 4) {                                  // each product adds to twice the sums of the planes above
    int c[4] = {};
#pragma unroll
    for (int p = PLANES - 1; p >= 0; p--) {
#pragma unroll
      for (int i = 0; i < 4; i++) c[i] = p == PLANES - 2 ? WHOLE_FLOAT / 16 - 2 * c[i] : 2 * c[i];
      multiply_bits(c, words[0], words[1], words[2], words[3], bits[p % PRODUCTS][0], bits[p % PRODUCTS][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i / 2][i % LANE_HEADS] = c[i];
    return;
  }
  int c[PRODUCTS][4] = {};
#pragma unroll
  for (int m = 0; m < PRODUCTS; m++) multiply_bits(c[m], words[0], words[1], words[2], words[3], bits[m][0], bits[m][1]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int a = 2 * r, b = 2 * r + 1;
    if (SLOT_HEADS == 2) {
      const int upper = WHOLE_FLOAT / 16 - 2 * c[2 % PRODUCTS][b] + c[2 % PRODUCTS][a];
      v[r][0] = c[0][a] + 2 * (c[0][b] + 2 * (c[1][a] + 2 * (c[1][b] + 2 * upper)));
    } else {                                              // planes 2 u and 2 u + 1, and 4 + 2 u and 5 + 2 u, u = t % 2
      v[r][0] = (c[0][a] + 2 * c[0][b] + 16 * (c[1][a] - 2 * c[1][b])) << (t % 2 ? 2 : 0);
    }
  }
  if (SLOT_HEADS == 1) {
    const int other = shuffle_xor(t % 2 ? v[0][0] : v[1][0], 1);
    v[0][0] = v[1][0] = (t % 2 ? v[1][0] : v[0][0]) + other + WHOLE_FLOAT;
  }
}

// Of a line's best scores, add the offset of the token that this lane keeps, that of row t % 2.
DEVICE float score_of_lane(const float (&best)[2], const u32 (&factors)[2], float offset_scale, int t) {
  const int u = t % 2;
  float score = u ? best[1] : best[0];
  if (GROUP > 1) score = fmaxf(score, shuffle_xor(u ? best[0] : best[1], 1));
  return fmaf(half((u ? factors[1] : factors[0]) >> 16), offset_scale, score);
}

// The log-sum-exp of a lane's heads.
typedef MaxSum LaneLse[SETS][LANE_HEADS];

// Add the exponentials of four of a lane's tokens.
DEVICE void add_exponentials(LaneLse& lse, const float (&estimates)[SETS][LANE_HEADS][4]) {
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
      const float(&z)[4] = estimates[set][j];
      MaxSum& sum = lse[set][j];
      const float top = fmaxf(sum.max, fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3])));
      sum.sum = sum.sum * exp2_fast(sum.max - top) + (exp2_fast(z[0] - top) + exp2_fast(z[1] - top)) +
                (exp2_fast(z[2] - top) + exp2_fast(z[3] - top));
      sum.max = top;
    }
}

// Merge the lanes of a warp, and store the result for each head that the row has.
template <int COUNT>
DEVICE void store_warp_lse(MaxSum (&warp_lse)[COUNT], LaneLse& lse, int lane) {
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
      MaxSum& sum = lse[set][j];
#pragma unroll
      for (int mask = 2; mask < 32; mask *= 2)
        sum = merge(sum, MaxSum{shuffle_xor(sum.max, mask), shuffle_xor(sum.sum, mask)});
      const int head = head_of(set, j, lane % 4);
      if (lane < 2 && head < COUNT) warp_lse[head] = sum;
    }
}
