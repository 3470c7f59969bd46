// What a scan found of tokens, and their keys: scores, or the estimates of a group's heads. After codes/choice.cuh. Macros:
// GROUP (1 to 8), the query heads of a group; COLUMNS (4 or 8), the estimates of a token, with those of absent heads;
// SOFTMAX (0 or 1): whether there are estimates.
//
// `s` is a kernel's struct of shared memory, `at` its struct of places, `a` that of its arguments; the members that a
// function reads have the same names in all kernels.

constexpr int AT_ONCE = SOFTMAX ? 16 / COLUMNS : 4;       // loads of a thread: of two tokens' estimates, or eight scores
constexpr int WORDS = SOFTMAX ? COLUMNS / 4 : 1;          // Words4 of a load
constexpr int EACH = SOFTMAX ? 2 : 8;                     // tokens of a load
constexpr int TOKEN_BYTES = WORDS * 16 / EACH;
constexpr u32 LAST_KEY = 0xFBFE;                          // of a finite score

// The tokens of a load.
typedef Words4 Load[WORDS];

DEVICE void load_found(Load& words, const u8* source, int token, bool exists) {
  const u8* of_token = source + (long long)token * TOKEN_BYTES;
  words[0] = load16<0>(of_token, exists);
  if (WORDS == 2) words[WORDS - 1] = load16<16>(of_token, exists);
}

// Where the loads of a pair's tokens begin.
template <class Arguments>
DEVICE const u8* found_of_pair(const Arguments& a, int pair) {
  return (SOFTMAX ? (const u8*)a.estimates : (const u8*)a.scores) + (long long)pair * a.num_tokens * TOKEN_BYTES;
}

// What the scan's blocks found of a head's log-sum-exp, a head a warp, four blocks a lane. Loaded apart from the merge, so
// that other loads can be on their way in between.
struct LoadedLse { float of[4]; };

template <class Arguments, class Place>
DEVICE LoadedLse load_scan_lse(const Arguments& a, const Place& at) {
  LoadedLse lse;
  const int blocks = (at.candidates + a.tokens_of_scan_block - 1) / a.tokens_of_scan_block;   // that found estimates
  const float* of_pair = a.scan_lse + (long long)at.pair * a.scan_blocks * COLUMNS;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 bits = as_bits(LOW);
    const int block = 32 * k + at.lane;
    load4(bits, of_pair + block * COLUMNS + at.warp, at.warp < GROUP && block < blocks);
    lse.of[k] = as_float(bits);
  }
  return lse;
}

// Merge them, in s.lse.
template <class Shared, class Arguments, class Place>
DEVICE void merge_lse(Shared& s, const Arguments& a, const Place& at, const LoadedLse& lse) {
  static_assert(WARPS >= GROUP, "a warp for every head");
  if (at.warp >= GROUP) return;
  const int blocks = (at.candidates + a.tokens_of_scan_block - 1) / a.tokens_of_scan_block;
  const float* of_pair = a.scan_lse + (long long)at.pair * a.scan_blocks * COLUMNS;
  float top = fmaxf(fmaxf(lse.of[0], lse.of[1]), fmaxf(lse.of[2], lse.of[3]));
#pragma unroll 1
  for (int i = 128 + at.lane; i < blocks; i += 32) top = fmaxf(top, of_pair[i * COLUMNS + at.warp]);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < 4; k++) sum += exp2_fast(lse.of[k] - top);
#pragma unroll 1
  for (int i = 128 + at.lane; i < blocks; i += 32) sum += exp2_fast(of_pair[i * COLUMNS + at.warp] - top);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
  if (at.lane == 0) s.lse[at.warp] = top + log2_fast(fmaxf(sum, 1e-30f));
}

DEVICE float number(const Load& words, int i) { return half(words[i / 8].x[i / 2 % 4] >> (16 * (i % 2))); }

// Two scores, of which NaN ranks with -inf.
DEVICE u32 without_nan(u32 scores) {
  if ((scores & 0x7FFF) > 0x7C00) scores = (scores & 0xFFFF0000u) | 0xFC00;
  if ((scores >> 16 & 0x7FFF) > 0x7C00) scores = (scores & 0xFFFFu) | 0xFC000000u;
  return scores;
}

// The keys of the tokens of a load, two a word.
DEVICE void find_keys(u32 (&found)[EACH / 2], const Load& words, const float (&lse)[GROUP]) {
  if (SOFTMAX) {
    float score[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float z[GROUP];
#pragma unroll
      for (int h = 0; h < GROUP; h++) z[h] = number(words, i * COLUMNS + h);
      score[i] = log_of_weights(z, lse);
    }
    found[0] = keys_of(without_nan(to_finite_half2(score[0], score[1])));
  } else {
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) found[i] = keys_of(without_nan(words[0].x[i % 4]));
  }
}

// The key of one of a load's tokens, in fewer instructions: code that runs once waits for each of them to be fetched.
DEVICE u32 find_key(const Load& words, int i, const float (&lse)[GROUP]) {
  u32 both = 0;
  if (SOFTMAX) {
    float z[GROUP];
#pragma unroll
    for (int h = 0; h < GROUP; h++) z[h] = i ? number(words, COLUMNS + h) : number(words, h);
    const float score = log_of_weights(z, lse);
    both = to_finite_half2(score, score);
  } else {
#pragma unroll
    for (int k = 0; k < EACH / 2; k++) both = i / 2 == k ? words[0].x[k % 4] >> (16 * (i % 2)) : both;
  }
  return keys_of(without_nan(both)) & 0xFFFF;
}

// The score of a key, as float16.
DEVICE u32 score_of_key(u32 key) { return key <= 0x7FFF ? 0x7FFF - key : 0x8000 | (key - 0x7FFF); }

// Give sink tokens the best key, and tokens that do not exist none.
template <class Place>
DEVICE void replace_special(u32 (&found)[EACH / 2], const Place& at, int token) {
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const u32 own = i % 2 ? 0xFFFF0000u : 0xFFFFu;
    if (token + i < at.sinks) found[i / 2] &= ~own;          // FORCED
    if (token + i >= at.end) found[i / 2] |= own;            // ABSENT
  }
}

DEVICE u32 key_of(const u32 (&found)[EACH / 2], int i) { return found[i / 2] >> (16 * (i % 2)) & 0xFFFF; }

template <class Shared>
DEVICE void load_lse(float (&lse)[GROUP], const Shared& s) {
#pragma unroll
  for (int h = 0; h < GROUP; h++) lse[h] = SOFTMAX ? s.lse[h] : 0.f;
}

// Store the keys of the block's tokens, and call count(key).
template <class Shared, class Place, class Count>
DEVICE void store_keys(const Shared& s, const Place& at, const u8* source, u16* keys, Count count) {
  float lse[GROUP];
  load_lse(lse, s);
#pragma unroll 1
  for (int first = EACH * at.tid; first < at.pages * PAGE; first += AT_ONCE * EACH * THREADS) {
    Load words[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int token = first + k * EACH * THREADS;
      load_found(words[k], source, token, token < at.end);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int token = first + k * EACH * THREADS;
      if (token >= at.pages * PAGE) break;
      u32 found[EACH / 2];
      find_keys(found, words[k], lse);
      replace_special(found, at, token);
#pragma unroll
      for (int i = 0; i < EACH / 2; i++) *(u32*)&keys[token + 2 * i] = found[i];
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (token + i < at.end) count(key_of(found, i));
    }
  }
}

// After the `need` chosen tokens, write those of the newest page, then -1; and how many there are.
template <class Arguments, class Place>
DEVICE void write_rest(const Arguments& a, const Place& at, int need, int count) {
  int* indices = a.block_indices + (long long)at.pair * a.max_tokens;
#pragma unroll 1
  for (int i = need + at.tid; i < count; i += THREADS) indices[i] = at.candidates + i - need;
  write_absent(a, at, count);
  if (at.tid == 0) a.block_counts[at.pair] = count;
}
