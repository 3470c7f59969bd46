// Leaves few of a row's tokens for the choice: for each row and KV head blocks_x() blocks, each with tokens that follow one
// another, list those that may be chosen. Compiled with _cluster.cuh, codes/bits.cuh, _cluster_step.cuh, codes/choice.cuh
// and codes/found.cuh before it, their macros, and these: THREADS of a block; BLOCKS that a multiprocessor has registers
// for; MOST_KEPT, tokens that a block lists; FIXED_BYTES, set apart for Shared.
//
// A sample says which key a token has at most that may be chosen, the limit. Every block takes the same sample, so none
// waits for another. Whether a token has such a key a sum of exponentials tells, without a logarithm. It sets the token's
// bit, from which the list is made when all tokens have been looked at; the keys of listed tokens alone are found.

struct Arguments {
  const u16* scores;                                      // float16 [pairs, num_tokens], not for SOFTMAX
  const u16* estimates;                                   // float16 [pairs, num_tokens, COLUMNS], base 2, for SOFTMAX
  const float* scan_lse;                                  // [pairs, scan_blocks, COLUMNS], base 2, for SOFTMAX
  const int *seq_start, *seq_end;
  u32* kept;                                              // [pairs, blocks, MOST_KEPT]: keys, or ABSENT, and places in the span
  int* kept_counts;                                       // [pairs, blocks + 1]; -1 of a list without all; last the limit
  int kv_heads, num_tokens, max_tokens, sink_tokens, page_size;
  int scan_blocks, tokens_of_scan_block;
  int span;                                               // tokens of a block, a multiple of 32
};

constexpr int SAMPLED = 1024, SAMPLED_EACH = SAMPLED / THREADS;      // pairs of neighbours in the sample, and of a thread
constexpr int SAMPLE_BINS = 2048, SAMPLE_SHIFT = 5;       // by the upper 11 bits of a key
constexpr float DEVIATIONS = 4.f;                         // by which the rank in the sample exceeds the expected one
constexpr float MARGIN = 0.001f;                          // above the rounding of a logarithm, but for that to float16

struct Shared {
  union {
    u32 bins[SAMPLE_BINS];                                // of the sample
    u16 listed[MOST_KEPT];                                // after it: places in the span
  };
  int warp_total[WARPS], edge, above, level;
  float lse[GROUP];
};

struct Place {
  int tid, lane, warp;
  int pair;
  int candidates;                                         // tokens of the row before the newest page
  int sinks, end;                                         // of the block's: tokens before these are sinks, and exist
};

// The first token of a pair of the sample, one from each of as many equal parts of the row. Which one of a part is a
// function of its number that has no period, as scores might.
DEVICE int sampled_token(int i, int candidates) {
  u32 mixed = (u32)i * 0x9E3779B1u;
  mixed = (mixed ^ mixed >> 15) * 0x85EBCA77u;
  const int pairs = candidates / 2;
  return 2 * (int)((offset(i, pairs) + (offset(mixed >> 22, pairs) >> 10)) / SAMPLED);
}

// Count the keys of the sample.
DEVICE void count_sample(Shared& s, const Place& at, const Load (&sample)[SAMPLED_EACH], int sinks) {
  float lse[GROUP];
  load_lse(lse, s);
#pragma unroll
  for (int k = 0; k < SAMPLED_EACH; k++) {
    const int token = sampled_token(k * THREADS + at.tid, at.candidates);
#pragma unroll 1
    for (int i = 0; i < 2; i++)
      if (token + i >= sinks) add_shared(&s.bins[find_key(sample[k], token % EACH + i, lse) >> SAMPLE_SHIFT]);
  }
}

// A key that about as many tokens reach as are to be chosen, and DEVIATIONS more if neighbours score alike; ABSENT if the
// sample has none. Within a bin it is interpolated.
DEVICE u32 find_limit(Shared& s, const Place& at, int need) {
  const float expected = (float)need * (2.f * SAMPLED) / (float)at.candidates;
  const int rank = (int)(expected + DEVIATIONS * sqrtf(2.f * expected)) + 4;
  find_bin<SAMPLE_BINS>(s, at, s.bins, rank);
  if (s.level == 0) return ABSENT;
  return ((u32)s.edge << SAMPLE_SHIFT) + (((rank - s.above) << SAMPLE_SHIFT) + s.level - 1) / s.level - 1;
}

// Set the bits of a load's tokens that may have keys of at most `limit`; `lowest` has for each head that estimate whose
// weight is the limit's.
DEVICE u32 may_be_chosen(const Load& words, const float (&lowest)[GROUP], u32 limit) {
  u32 mask = 0;
  if (SOFTMAX) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = 0.f;
#pragma unroll
      for (int h = 0; h < GROUP; h++) sum += exp2_fast(number(words, i * COLUMNS + h) - lowest[h]);
      mask |= (u32)(sum >= 1.f) << i;
    }
  } else {
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
      const u32 both = keys_of(words[0].x[i / 2 % 4]);
      mask |= (u32)((both & 0xFFFF) <= limit) << i | (u32)(both >> 16 <= limit) << (i + 1);
    }
  }
  return mask;
}

// Mark the tokens of the span that may be chosen, and others that do not exist. `words` has the first loads.
DEVICE void mark_tokens(const Shared& s, const Place& at, const u8* source, Load (&words)[AT_ONCE], u32* marks, u32 limit) {
  // A score of at least this, the greatest below that of the limit, has all rounding on its side.
  const float least = (half(score_of_key(limit + 1)) - MARGIN) * LOG2_E;
  float lowest[GROUP];
  load_lse(lowest, s);
#pragma unroll
  for (int h = 0; h < GROUP; h++) lowest[h] += least;
#pragma unroll 1
  for (int first = EACH * at.tid; first < at.end; first += AT_ONCE * EACH * THREADS) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int token = first + k * EACH * THREADS, next = token + AT_ONCE * EACH * THREADS;
      const u32 mask = may_be_chosen(words[k], lowest, limit);
      load_found(words[k], source, next, next < at.end);
      if (mask && token < at.end) set_bits(marks, token, mask);
    }
  }
}

// The bits of 32 tokens, of which the first `count` are set.
DEVICE u32 first_bits(int count) { return count >= 32 ? ~0u : (1u << max(count, 0)) - 1; }

// List the marked tokens in ascending order, with all sinks, and none that do not exist. Returns how many there are.
DEVICE int list_marked(Shared& s, const Place& at, u32* marks, int words) {
  const int each = (words + THREADS - 1) / THREADS, begin = min(at.tid * each, words), end = min(begin + each, words);
  int mine = 0;
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    marks[i] = (marks[i] | first_bits(at.sinks - 32 * i)) & first_bits(at.end - 32 * i);
    mine += count_bits(marks[i]);
  }
  int n = sum_before(s, at, mine);
  if (at.tid == THREADS - 1) s.above = n + mine;
#pragma unroll 1
  for (int i = begin; i < end; i++)
#pragma unroll 1
    for (u32 left = marks[i]; left; left &= left - 1, n++)
      if (n < MOST_KEPT) s.listed[n] = (u16)(32 * i + count_bits((left & (0u - left)) - 1));
  sync_block();
  return s.above;
}

// Write the listed tokens with their keys.
DEVICE void write_listed(const Shared& s, const Place& at, const u8* source, int count, u32 limit, u32* kept) {
  float lse[GROUP];
  load_lse(lse, s);
#pragma unroll 1
  for (int i = at.tid; i < count; i += THREADS) {
    const int token = s.listed[i], first = token / EACH * EACH;
    Load words;
    load_found(words, source, first, true);
    const u32 key = token < at.sinks ? FORCED : find_key(words, token - first, lse);
    kept[i] = (key <= limit ? key : ABSENT) << 16 | (u32)token;
  }
}

KERNEL(keep_candidates)(const Arguments a) {
  u8* memory = dynamic_shared();
  Shared& s = *(Shared*)memory;
  static_assert(sizeof(Shared) <= FIXED_BYTES, "what follows has a place of its own");
  const int words = a.span / 32;
  u32* marks = (u32*)(memory + FIXED_BYTES);
  Place at;
  at.tid = thread_index(), at.lane = at.tid % 32, at.warp = at.tid / 32, at.pair = block_y();
#pragma unroll 1
  for (int i = at.tid; i < SAMPLE_BINS; i += THREADS) s.bins[i] = 0;
#pragma unroll 1
  for (int i = at.tid; i < words; i += THREADS) marks[i] = 0;
  // The kernel before, a scan that left estimates, has waited for those before it: the bounds of rows are final. What
  // left scores may be any kernel.
  if (!SOFTMAX) wait_for_previous_kernel();
  const int row = at.pair / a.kv_heads, length = min(max(a.seq_end[row] - a.seq_start[row], 0), a.num_tokens);
  at.candidates = max(length - 1, 0) / a.page_size * a.page_size;
  const int need = max(min(length, a.max_tokens) - (length - at.candidates), 0), begin = block_x() * a.span;
  at.sinks = a.sink_tokens - begin, at.end = min(at.candidates - begin, a.span);
  const u8 *of_pair = found_of_pair(a, at.pair), *source = of_pair + (long long)begin * TOKEN_BYTES;
  const long long list = (long long)at.pair * blocks_x() + block_x();
  int* counts = a.kept_counts + (long long)at.pair * (blocks_x() + 1);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (at.candidates >= 2 * SAMPLED && need <= at.candidates / 8) {
    LoadedLse lse;
    Load sample[SAMPLED_EACH], first[AT_ONCE];
    if (SOFTMAX) lse = load_scan_lse(a, at);
#pragma unroll
    for (int k = 0; k < SAMPLED_EACH; k++)
      load_found(sample[k], of_pair, sampled_token(k * THREADS + at.tid, at.candidates) / EACH * EACH, true);
    if (SOFTMAX) merge_lse(s, a, at, lse);
    sync_block();
    count_sample(s, at, sample, a.sink_tokens);
    // Not before: the loads above would wait for these.
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int token = EACH * (at.tid + k * THREADS);
      load_found(first[k], source, token, token < at.end);
    }
    const u32 limit = find_limit(s, at, need);
    if (limit < LAST_KEY) {
      mark_tokens(s, at, source, first, marks, limit);
      sync_block();
      const int count = list_marked(s, at, marks, words);
      if (at.tid == 0) {
        counts[block_x()] = count <= MOST_KEPT ? count : -1;
        if (block_x() == 0) counts[blocks_x()] = limit;
      }
      if (count <= MOST_KEPT) write_listed(s, at, source, count, limit, a.kept + list * MOST_KEPT);
      return;
    }
  }
  if (at.tid == 0) counts[block_x()] = -1;
}
