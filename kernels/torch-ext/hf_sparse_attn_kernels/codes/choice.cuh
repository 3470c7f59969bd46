// The choice of tokens by float16 scores, exact, by a cluster of blocks that each have the keys of some tokens in shared
// memory. After _cluster_step.cuh, with PAGE. Macro: GROUP.
//
// Two rounds of counts, of the upper 9 bits of the keys and of the lower 7, find the least chosen score. Between them each
// warp lists those of its tokens that the first round leaves, so that the rest looks at few. If they lie together, so that a
// warp has no room for its own, all warps' lists become one, and each takes a part of it. Blocks, and warps, have tokens
// that follow one another: the chosen ones of the blocks in turn are in ascending order.

constexpr int BINS = 512, LOWER_BINS = 128;               // of the two rounds
constexpr int MOST_LISTED = 256, LISTED_PAGES = 4;        // tokens that a warp lists, and pages whose keys it loads at once
constexpr u32 FORCED = 0, ABSENT = 0xFFFF;                // keys of a sink token, the best, and of none

struct Choice {
  union {
    Words4 counts_in[CLUSTER][BINS / 8];                  // u16 of each block's bins, in the first round
    u16 listed[WARPS][MOST_LISTED];                       // after it
  };
  Words4 lower_counts_in[CLUSTER][LOWER_BINS / 8];
  alignas(16) u32 histogram[BINS];
  int warp_total[WARPS], above_of[CLUSTER], level_of[CLUSTER];
  int edge, above, level;
};

// Whole numbers in the descending order of two float16 scores; -0 ties with 0. NaN has 0, so that all of them tie.
DEVICE u32 keys_of(u32 scores) {
  const u32 negative = (scores >> 15 & 0x00010001u) * 0xFFFFu, magnitude = scores & 0x7FFF7FFFu;
  return 0x7FFF7FFFu - (magnitude & ~negative) + (magnitude & negative);
}

// The natural logarithm of the sum of a token's weights over the heads, from estimates to the base of 2.
DEVICE float log_of_weights(const float (&z)[GROUP], const float (&lse)[GROUP]) {
  float top = fmaxf(z[0] - lse[0], LOW), others[GROUP], sum = 1.f;         // the greatest weight, divided by itself
#pragma unroll
  for (int h = 1; h < GROUP; h++) {
    const float weight = z[h] - lse[h];
    others[h] = fminf(top, weight), top = fmaxf(top, weight);
  }
#pragma unroll
  for (int h = 1; h < GROUP; h++) sum += exp2_fast(others[h] - top);
  return (top + log2_fast(sum)) * LN_2;
}

// Before any key is counted.
template <class Place>
DEVICE void clear_counts(Choice& s, const Place& at) {
#pragma unroll 1
  for (int i = at.tid; i < BINS; i += THREADS) s.histogram[i] = 0;
#pragma unroll 1
  for (int i = at.tid; i < CLUSTER; i += THREADS) s.above_of[i] = 0;
}

// Count a key in the first round.
DEVICE void count_key(Choice& s, u32 key) { add_shared((u32*)((u8*)s.histogram + (key >> 5 & ~3u))); }

// A warp's tokens that the choice is among, in ascending order: listed, or, if the block has too many for that, all it has.
struct Among {
  const u16 *listed, *keys;
  int first, count;                                       // listed or all
  bool fits;

  DEVICE int place(int i) const { return fits ? listed[i] : first + i; }   // in the block
  DEVICE u32 key(int i) const { return i < count ? keys[place(i)] : ABSENT; }
};

// Write the places of those tokens of a warp's pages whose keys are less than `limit`, up to `room`. Returns how many there
// are.
DEVICE int write_places(int lane, const u16* keys, u32 limit, int begin, int end, u16* listed, int room)
{
  const u32 lanes_before = (1u << lane) - 1;
  int count = 0;
#pragma unroll 1
  for (int page = begin; page < end; page += LISTED_PAGES) {
    u32 pairs[LISTED_PAGES];                              // keys of two tokens
#pragma unroll
    for (int k = 0; k < LISTED_PAGES; k++)
      pairs[k] = page + k < end ? *(const u32*)&keys[(page + k) * PAGE + 2 * lane] : ~0u;
#pragma unroll
    for (int k = 0; k < LISTED_PAGES; k++) {
      const int place = (page + k) * PAGE + 2 * lane;
      const bool low = (pairs[k] & 0xFFFF) < limit, high = pairs[k] >> 16 < limit;
      const u32 lows = warp_ballot(low), highs = warp_ballot(high);
      const int n = count + count_bits(lows & lanes_before) + count_bits(highs & lanes_before);
      if (low && n < room) listed[n] = (u16)place;
      if (high && n + low < room) listed[n + low] = (u16)(place + 1);
      count += count_bits(lows) + count_bits(highs);
    }
  }
  return count;
}

// List the tokens of the block's pages whose keys are less than `limit`.
template <class Place>
DEVICE Among list_tokens(Choice& s, const Place& at, const u16* keys, u32 limit) {
  const int each = (at.pages + WARPS - 1) / WARPS, begin = min(at.warp * each, at.pages), end = min(begin + each, at.pages);
  const int count = write_places(at.lane, keys, limit, begin, end, s.listed[at.warp], MOST_LISTED);
  if (at.lane == 0) s.warp_total[at.warp] = count;
  sync_block();
  const int of_lane = at.lane < WARPS ? s.warp_total[at.lane] : 0, total = warp_sum(of_lane);
  if (warp_ballot(of_lane > MOST_LISTED) == 0 || total > WARPS * MOST_LISTED) {
    const bool fits = count <= MOST_LISTED;
    return Among{s.listed[at.warp], keys, begin * PAGE, fits ? count : (end - begin) * PAGE, fits};
  }
  u16* all = s.listed[0];
  write_places(at.lane, keys, limit, begin, end, all + warp_sum(at.lane < at.warp ? of_lane : 0), WARPS * MOST_LISTED);
  sync_block();
  const int share = (total + 32 * WARPS - 1) / (32 * WARPS) * 32, first = min(at.warp * share, total);
  return Among{all + first, keys, 0, min(share, total - first), true};
}

struct Last {
  u32 key;                                                // of the least chosen score
  int ties;                                               // how many tokens with it are chosen
};

// Find the `need`-th token, whose keys are counted, and a warp's tokens that may be chosen. Uses two barriers.
template <class Place>
DEVICE Last find_last(Choice& s, const Place& at, const u16* keys, int need, u64* barriers, Among& among) {
  find_edge<BINS>(s, at, s.counts_in, &barriers[EVEN_COUNTS], 0, need);
  const int edge = s.edge, above = s.above;
#pragma unroll 1
  for (int i = at.tid; i < LOWER_BINS; i += THREADS) s.histogram[i] = 0;   // which was sent
  sync_block();                                           // no counts are read any more
  among = list_tokens(s, at, keys, min((u32)(edge + 1) << 7, ABSENT));
#pragma unroll 1
  for (int i = at.lane; i < among.count; i += 32) {
    const u32 key = among.key(i);
    if ((int)(key >> 7) == edge) add_shared(&s.histogram[key & 127]);
  }
  find_edge<LOWER_BINS>(s, at, s.lower_counts_in, &barriers[ODD_COUNTS], 0, need - above);
  return Last{(u32)edge << 7 | (u32)s.edge, max(need - above - s.above, 0)};
}

// Call emit(n, place) for the tokens of the block that are chosen: number n of the row, by their places in the block.
template <class Place, class Emit>
DEVICE void emit_chosen(Choice& s, const Place& at, const Among& among, const Last& last, Emit emit) {
  int less = 0, equal = 0;                                // of the warp's tokens
#pragma unroll 1
  for (int i = 0; i < among.count; i += 32) {
    const u32 key = among.key(i + at.lane);
    less += count_bits(warp_ballot(key < last.key)), equal += count_bits(warp_ballot(key == last.key));
  }
  if (at.lane == 0) s.warp_total[at.warp] = (int)((u32)equal << 16 | (u32)less);
  sync_block();
  const int level = at.lane < CLUSTER ? s.level_of[at.lane] : 0;
  int before = level;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = shuffle_up(before, distance);
    if (at.lane >= distance) before += other;
  }
  const int taken = clamp(last.ties - (before - level), 0, level), own_ties = shuffle(taken, at.rank);
  const int first = warp_sum(at.lane < at.rank ? s.above_of[at.lane] + taken : 0);
  const u32 earlier = (u32)warp_sum(at.lane < at.warp ? s.warp_total[at.lane] : 0);
  less = earlier & 0xFFFF, equal = earlier >> 16;         // of the block's tokens before
  const u32 lanes_before = (1u << at.lane) - 1;
#pragma unroll 1
  for (int i = 0; i < among.count; i += 32) {
    const u32 key = among.key(i + at.lane);
    const u32 lesses = warp_ballot(key < last.key), equals = warp_ballot(key == last.key);
    const int tied = equal + count_bits(equals & lanes_before);
    if (key < last.key || (key == last.key && tied < own_ties))
      emit(first + less + count_bits(lesses & lanes_before) + min(tied, own_ties), among.place(i + at.lane));
    less += count_bits(lesses), equal += count_bits(equals);
  }
}

// Write -1 after the `count` chosen tokens.
template <class Arguments, class Place>
DEVICE void write_absent(const Arguments& a, const Place& at, int count) {
#pragma unroll 1
  for (int i = count + at.tid; i < a.max_tokens; i += THREADS) a.block_indices[(long long)at.pair * a.max_tokens + i] = -1;
}
