// The choice of tokens by what a scan found of them: one launch, for each row and KV head a cluster of CLUSTER blocks.
// Compiled with _cluster.cuh, codes/bits.cuh, codes/estimates.cuh, _cluster_step.cuh and codes/choice.cuh before it and
// their macros, and these: CLUSTER (1 to 16), THREADS of a block; BLOCKS that a multiprocessor has registers for; BY, what
// is known of a token, one of those below; DEVIATIONS, standard deviations by which a rank in the sample exceeds the expected
// one, and LEAST_RANK, by which it does besides; FIXED_BYTES, set apart for Shared.
//
// The keys of a sample say which tokens may be chosen, as a rule a few hundredths. These are listed while the keys of all
// are stored. If it then shows that others would have been chosen, all tokens are looked through.
//
// Provisional scores have stand-ins in the place of the log-sum-exp of every head. A score is at most its provisional one
// and the greatest error of a stand-in. So the listed tokens alone are estimated again.

constexpr int SCORES = 0, ESTIMATES = 1, PROVISIONAL = 2;

struct Arguments {
  const u16* scores;                                      // float16 [pairs, num_tokens], not for ESTIMATES
  const u16* estimates;                                   // float16 [pairs, num_tokens, COLUMNS], base 2, for ESTIMATES
  const float* scan_lse;                                  // [pairs, scan_blocks, COLUMNS], base 2, not for SCORES
  const float* stand_ins;                                 // [pairs, COLUMNS], for PROVISIONAL, like the next
  const u8* codes;                                        // [pairs, max_pages * PAGE, BYTES]
  const u32* factors;                                     // [pairs, max_pages * PAGE] of two float16
  const s8* parts;                                        // [pairs, COLUMNS, HEAD_DIM]: the rotated query, doubled
  const float* slopes;                                    // [pairs, COLUMNS]
  const float* page_scores;                               // [pairs, max_pages, COLUMNS]
  const int *seq_start, *seq_end;
  int* block_indices;                                     // [pairs, max_tokens]
  int* block_counts;                                      // [pairs]
  int kv_heads, num_tokens, max_tokens, sink_tokens, page_size;
  int scan_blocks, tokens_of_scan_block, max_pages;
  float offset_scale;
};

constexpr int AT_ONCE = BY == ESTIMATES ? 16 / COLUMNS : 4;       // loads of a thread: of two tokens' estimates, or eight scores
constexpr int WORDS = BY == ESTIMATES ? COLUMNS / 4 : 1;          // Words4 of a load
constexpr int EACH = BY == ESTIMATES ? 2 : 8;                     // tokens of a load

struct Shared {
  Choice choice;
  Words4 counts_in[CLUSTER][BINS / 8];                    // of listed tokens, in the first round
  u64 barriers[BARRIERS];
  float lse[GROUP], stand_ins[GROUP];
  Query query;                                            // for PROVISIONAL, as stand_ins
  int listed[WARPS];                                      // how many each warp has listed, or would with more room
  int edge;                                               // the sample's bin with the last one
};

struct Place {
  int tid, lane, warp, g, t;                              // lane = 4 g + t
  int rank, pair;
  int candidates;                                         // tokens of the row before the newest page
  int first_page, pages;                                  // of this block, of PAGE tokens, whatever page_size is
};

// Merge the log-sum-exp of a head that the scan's blocks found: a warp.
DEVICE void merge_lse(Shared& s, const Arguments& a, const Place& at, int h) {
  const int blocks = (at.candidates + a.tokens_of_scan_block - 1) / a.tokens_of_scan_block;   // that found estimates
  const float* of_pair = a.scan_lse + (long long)at.pair * a.scan_blocks * COLUMNS;
  if (BY == PROVISIONAL && at.lane == 0) s.stand_ins[h] = a.stand_ins[(long long)at.pair * COLUMNS + h];
  MaxSum all{LOW, 0.f};
#pragma unroll 4
  for (int i = at.lane; i < blocks; i += 32) all = merge(all, MaxSum{of_pair[i * COLUMNS + h], 1.f});
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) all = merge(all, MaxSum{shuffle_xor(all.max, mask), shuffle_xor(all.sum, mask)});
  if (at.lane == 0) s.lse[h] = all.max + log2_fast(fmaxf(all.sum, 1e-30f));
}

DEVICE float number(const Words4 (&words)[WORDS], int i) { return half(words[i / 8].x[i / 2 % 4] >> (16 * (i % 2))); }

// The scores of the tokens of a load, two a word. NaN ranks with -inf.
DEVICE void find_scores(u32 (&scores)[EACH / 2], const Words4 (&words)[WORDS], const float (&lse)[GROUP]) {
  if (BY == ESTIMATES) {
    float score[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float z[GROUP];
#pragma unroll
      for (int h = 0; h < GROUP; h++) z[h] = number(words, i * COLUMNS + h);
      score[i] = log_of_weights(z, lse);
    }
    scores[0] = without_nan(to_finite_half2(score[0], score[1]));
  } else {
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) scores[i] = without_nan(words[0].x[i % 4]);
  }
}

// Load what is known of EACH tokens, from one whose place in the row is a multiple of that.
DEVICE void load_words(Words4 (&words)[WORDS], const Arguments& a, const Place& at, int token, bool exists) {
  const long long of_pair = (long long)at.pair * a.num_tokens;
  const u8* source = BY == ESTIMATES ? (const u8*)(a.estimates + of_pair * COLUMNS) : (const u8*)(a.scores + of_pair);
  const u8* of_token = source + (long long)token * (WORDS * 16 / EACH);
  words[0] = load16<0>(of_token, exists);
  if (WORDS == 2) words[WORDS - 1] = load16<16>(of_token, exists);
}

DEVICE void load_lse(float (&lse)[GROUP], const Shared& s) {
#pragma unroll
  for (int h = 0; h < GROUP; h++) lse[h] = BY == ESTIMATES ? s.lse[h] : 0.f;
}

// The score of a key, as float16: NaN for a key that no score has.
DEVICE u32 score_of_key(u32 key) { return key < 0x7FFF ? 0x7FFF - key : 0x8000 | (key - 0x7FFF); }

// The least score that has a key less than `limit`.
DEVICE u32 least_score(u32 limit) { return limit > 0xFBFF ? 0xFC00 : score_of_key(limit - 1); }

// A key that no chosen token's provisional score reaches, if the last one by these has a key of bin `edge`: its score is
// at least that bin's least and the least error of a stand-in, and no other's exceeds its provisional one by more than the
// greatest.
DEVICE u32 provisional_limit(const Shared& s, int edge) {
  float least = -LOW, most = LOW;
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    const float error = s.stand_ins[h] - s.lse[h];
    least = fminf(least, error), most = fmaxf(most, error);
  }
  const float score = half(score_of_key(((u32)edge << 7) + 127));
  const float rounding = 0.05f + 0.002f * (fabsf(score) + fmaxf(fabsf(least), fabsf(most)));
  const float bound = score - (most - least) - rounding;
  if (!(bound > -MOST_LOGARITHM)) return ABSENT;          // where a logarithm may be that of 0, or NaN
  return (keys_of(to_finite_half2(bound, bound)) & 0xFFFF) + 1;
}

// Find a key that those of all chosen tokens are less than, as the keys of a sample say, one token a thread from as many
// equal parts of the row. All blocks find the same.
DEVICE u32 limit_by_sample(Shared& s, const Arguments& a, const Place& at, int need) {
  constexpr int BINS_EACH = BINS / THREADS > 0 ? BINS / THREADS : 1;
  const int sinks = min(a.sink_tokens, at.candidates), tokens = at.candidates - sinks;
  const float expected = (float)max(need - sinks, 0) * (float)THREADS / (float)max(tokens, 1);
  const int rank = max((int)(expected + (float)DEVIATIONS * sqrtf(expected)) + LEAST_RANK, 1);
  if (rank > THREADS / 2) return ABSENT;
  u32 mixed = (u32)at.tid * 0x9E3779B1u;                  // a place in the part that has no period, as scores might
  mixed = (mixed ^ mixed >> 15) * 0x85EBCA77u;
  const int token = sinks + (int)(((long long)at.tid * tokens + ((long long)(mixed >> 22) * tokens >> 10)) / THREADS);
  Words4 words[WORDS];
  float lse[GROUP];
  u32 scores[EACH / 2], pair = 0;
  load_words(words, a, at, token / EACH * EACH, true);
  load_lse(lse, s);
  find_scores(scores, words, lse);
#pragma unroll
  for (int i = 0; i < EACH / 2; i++) pair |= token % EACH / 2 == i ? scores[i] : 0;
  count_key(s.choice, keys_of(pair) >> (16 * (token % 2)) & 0xFFFF);
  sync_block();
  int count[BINS_EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) {
    const int bin = at.tid * BINS_EACH + i;
    sum += count[i] = bin < BINS ? (int)s.choice.histogram[bin] : 0;
  }
  int before = sum_before(s.choice, at, sum);
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) {
    if (before < rank && rank <= before + count[i]) s.edge = at.tid * BINS_EACH + i;
    before += count[i];
  }
  sync_block();
  clear_counts(s.choice, at);
  return BY == PROVISIONAL ? provisional_limit(s, s.edge) : min((u32)(s.edge + 1) << 7, ABSENT);
}

// Which tokens of a load have scores of at least the two of `least`, a bit each.
DEVICE u32 find_listed(const u32 (&scores)[EACH / 2], u32 least) {
  u32 both = 0;
#pragma unroll
  for (int i = 0; i < EACH / 2; i++) both |= reach_half2(scores[i], least) & (1u << (2 * i) | 1u << (2 * i + 17));
  return (both | both >> 16) & ((1u << EACH) - 1);
}

// Give sink tokens the key FORCED, tokens that do not exist ABSENT, and list the former alone.
DEVICE void find_special(u32 (&found)[EACH / 2], u32& mask, int token, int sinks, int exist) {
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const u32 own = i % 2 ? 0xFFFF0000u : 0xFFFFu;
    if (token + i < sinks) found[i / 2] &= ~own, mask |= 1u << i;
    if (token + i >= exist) found[i / 2] |= own, mask &= ~(1u << i);
  }
}

// Store the keys of the warp's tokens, and list those less than `limit`.
DEVICE Among store_keys(Shared& s, const Arguments& a, const Place& at, u16* keys, u32 limit) {
  const Pages pages = pages_of(at, at.warp);
  const int begin = at.first_page * PAGE, end = pages.end * PAGE;
  const int sinks = a.sink_tokens - begin, exist = min(at.candidates - begin, end);
  u16* listed = s.choice.listed[at.warp];
  const u32 least = least_score(limit) * 0x10001u;
  float lse[GROUP];
  load_lse(lse, s);
  int count = 0;
#pragma unroll 1
  for (int first = pages.begin * PAGE; first < end; first += AT_ONCE * EACH * 32) {
    Words4 words[AT_ONCE][WORDS];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int token = first + (k * 32 + at.lane) * EACH;
      load_words(words[k], a, at, begin + token, token < exist);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int of_warp = first + k * 32 * EACH, token = of_warp + at.lane * EACH;
      if (of_warp >= end) break;
      u32 scores[EACH / 2], found[EACH / 2];
      find_scores(scores, words[k], lse);
      u32 mask = find_listed(scores, least);
#pragma unroll
      for (int i = 0; i < EACH / 2; i++) found[i] = keys_of(scores[i]);
      if (of_warp < sinks || of_warp + 32 * EACH > exist) find_special(found, mask, token, sinks, exist);
      if (token < end)
#pragma unroll
        for (int i = 0; i < EACH / 2; i++) *(u32*)&keys[token + 2 * i] = found[i];
      if (warp_ballot(mask != 0) == 0) continue;
      int until = count_bits(mask);
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = shuffle_up(until, distance);
        if (at.lane >= distance) until += other;
      }
      int n = count + until - count_bits(mask);
      count += shuffle(until, 31);
#pragma unroll 1
      for (; mask; mask &= mask - 1, n++)
        if (n < MOST_LISTED) listed[n] = (u16)(token + first_bit(mask));
      sync_warp();
    }
  }
  if (at.lane == 0) s.listed[at.warp] = count;
  sync_warp();
  return among_listed(s.choice, at, keys, at.warp, count);
}

// Leave those of the warp's listed tokens that have keys less than `limit`.
DEVICE void list_fewer(Shared& s, const Place& at, const u16* keys, u32 limit, Among& among) {
  if (!among.fits) {
    among = list_tokens(s.choice, at, keys, limit);
  } else {
    u16* listed = s.choice.listed[at.warp];
    int count = 0;
#pragma unroll 1
    for (int i = 0; i < among.count; i += 32) {
      const bool stays = among.key(i + at.lane) < limit;
      const int place = stays ? listed[i + at.lane] : 0;
      const u32 staying = warp_ballot(stays);
      if (stays) listed[count + count_bits(staying & ((1u << at.lane) - 1))] = (u16)place;
      count += count_bits(staying);
      sync_warp();
    }
    among.count = count;
  }
  if (at.lane == 0) s.listed[at.warp] = among.fits ? among.count : MOST_LISTED + 1;
}

// Give the listed tokens of all warps, or all tokens, the keys of their scores, and count them. The warps take turns.
DEVICE void score_again(Shared& s, const Arguments& a, const Place& at, u16* keys, bool all) {
  const int u = at.t % 2;
  const long long first_token = (long long)at.pair * a.max_pages * PAGE;
  const float* page_scores = a.page_scores + (long long)at.pair * a.max_pages * COLUMNS;
  Planes planes;
  load_planes(planes, s.query.planes, at.g, at.t);
  Head head;
  load_head(head, s.query, at.t);
  OfHeads lse;
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
      const int h = head_of(set, j, at.t);
      lse[set][j] = h < GROUP ? s.lse[h] : 0.f;
    }
  const int listed = at.lane >= WARPS ? 0 : all ? MOST_LISTED + 1 : s.listed[at.lane];
  const int turns = at.lane >= WARPS ? 0 : (among_listed(s.choice, at, keys, at.lane, listed).count + 31) / 32;
  int turns_until = turns;                                // of the warps up to that of this lane's number
#pragma unroll
  for (int distance = 1; distance < WARPS; distance *= 2) {
    const int other = shuffle_up(turns_until, distance);
    if (at.lane >= distance) turns_until += other;
  }
  const int all_turns = shuffle(turns_until, WARPS - 1);
#pragma unroll 1
  for (int turn = at.warp; turn < all_turns; turn += WARPS) {
    const int warp = count_bits(warp_ballot(turns_until <= turn && at.lane < WARPS));   // which has listed them
    const Among among = among_listed(s.choice, at, keys, warp, shuffle(listed, warp));
    const int first = 32 * (turn - shuffle(turns_until - turns, warp));
    u32 words[4] = {}, factors[2] = {};
    Centre centre[2] = {};
    const Centre* const centres[2] = {&centre[0], &centre[1]};
    int place[2];                                         // of the lane's tokens
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const int i = first + 16 * r + 8 * p + at.g;
        const bool exists = i < among.count;
        const int of_token = exists ? among.place(i) : 0, token = at.first_page * PAGE + of_token;
        load4(words[2 * p + r], a.codes + (first_token + token) * BYTES + 4 * at.t, exists);
        if (p != at.t / 2) continue;
        place[r] = exists ? of_token : -1;
        load4(factors[r], a.factors + first_token + token, exists);
        load_centre(centre[r], page_scores, at.t, token / PAGE, exists);
      }
    const float factor[2] = {half(factors[0]), half(factors[1])};
    MaxSum weights[2] = {{LOW, 0.f}, {LOW, 0.f}};
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      float z[2][LANE_HEADS];
      estimate(z, words, factor, planes, head, centres, set, at.t);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 both = with_offset(z[r], factors[r], a.offset_scale);
#pragma unroll
        for (int j = 0; j < LANE_HEADS; j++) weights[r] = merge(weights[r], MaxSum{half(both >> (16 * j)) - lse[set][j], 1.f});
      }
    }
    const MaxSum own = u ? weights[1] : weights[0], others = u ? weights[0] : weights[1];
    const MaxSum both = merge(own, MaxSum{shuffle_xor(others.max, 1), shuffle_xor(others.sum, 1)});
    const float score = (both.max + log2_fast(both.sum)) * LN_2;
    const u32 key = keys_of(without_nan(to_finite_half2(score, score))) & 0xFFFF;
    const int of_token = u ? place[1] : place[0];
    if (of_token >= 0) {
      if (keys[of_token] != FORCED) keys[of_token] = (u16)key;
      count_key(s.choice, keys[of_token]);
    }
  }
}

// Count the keys of the listed tokens.
DEVICE void count_listed(Shared& s, const Place& at, const Among& among) {
#pragma unroll 1
  for (int i = at.lane; i < among.count; i += 32) {
    const u32 key = among.key(i);
    if (key != ABSENT) count_key(s.choice, key);
  }
}

// Find the `need`-th token, and the warp's tokens that may be chosen: as a rule among those listed, which have keys less
// than `limit`.
DEVICE Last find_last_listed(Shared& s, const Arguments& a, const Place& at, u16* keys, int need, u32 limit, Among& among) {
  Choice& choice = s.choice;
  sync_block();                                           // no counts, and all keys
  count_listed(s, at, among);
  wait_cluster();                                         // all blocks run, and their barriers exist
  int exchange = 0;
  find_edge<BINS>(choice, at, s.counts_in, &s.barriers[barrier_of(exchange)], parity_of(exchange), need);
  bool certain = need <= 0 || (choice.level > 0 && (choice.edge + 1) << 7 <= limit) || limit == ABSENT;
  if (BY == PROVISIONAL && need > 0) {
    const u32 fewer = provisional_limit(s, choice.edge);
    certain = certain && fewer <= limit;
    if (certain) {
      sync_block();                                       // no counts are read any more
      clear_counts(choice, at);
      list_fewer(s, at, keys, fewer, among);
      sync_block();
      score_again(s, a, at, keys, false);
      exchange++;
      find_edge<BINS>(choice, at, choice.counts_in, &s.barriers[barrier_of(exchange)], parity_of(exchange), need);
    }
  }
  exchange++;
  if (certain) {
    const int edge = choice.edge, above = choice.above;
#pragma unroll 1
    for (int i = at.tid; i < LOWER_BINS; i += THREADS) choice.histogram[i] = 0;   // which was sent
    sync_block();
    return find_among(choice, at, among, edge, above, need, s.barriers, exchange);
  }
  sync_block();                                           // the sample misled: all blocks find that
  clear_counts(choice, at);
  sync_block();
  if (BY == PROVISIONAL)
    score_again(s, a, at, keys, true);
  else
#pragma unroll 1
    for (int i = at.tid; i < at.pages * PAGE; i += THREADS)
      if (keys[i] != ABSENT) count_key(choice, keys[i]);
  return find_last(choice, at, keys, need, s.barriers, exchange, among);
}

KERNEL(choose_by_score)(const Arguments a) {
  u8* memory = dynamic_shared();
  Shared& s = *(Shared*)memory;
  static_assert(sizeof(Shared) <= FIXED_BYTES, "what follows has a place of its own");
  u16* keys = (u16*)(memory + FIXED_BYTES);
  Place at;
  at.tid = thread_index(), at.lane = at.tid % 32, at.warp = at.tid / 32, at.rank = cluster_rank(), at.pair = block_y();
  at.g = at.lane / 4, at.t = at.lane % 4;
  if (at.tid == 0) {
    for (int i = 0; i < BARRIERS; i++) init_barrier(&s.barriers[i]);
    publish_barriers();
  }
  sync_warp();
  arrive_cluster();
  clear_counts(s.choice, at);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int row = at.pair / a.kv_heads, length = min(max(a.seq_end[row] - a.seq_start[row], 0), a.num_tokens);
  at.candidates = max(length - 1, 0) / a.page_size * a.page_size;
  const int pages = (at.candidates + PAGE - 1) / PAGE, each = (pages + CLUSTER - 1) / CLUSTER;
  at.first_page = min(at.rank * each, pages), at.pages = min(each, pages - at.first_page);
  if (BY != SCORES)
#pragma unroll 1
    for (int i = at.warp; i < (BY == PROVISIONAL ? 2 : 1) * GROUP; i += WARPS)
      if (i < GROUP)
        merge_lse(s, a, at, i);
      else
        split_query(s.query, a, at, i - GROUP);
  sync_block();
  const int newest = length - at.candidates, count = min(length, a.max_tokens), need = max(count - newest, 0);
  int* indices = a.block_indices + (long long)at.pair * a.max_tokens;
  const u32 limit = limit_by_sample(s, a, at, need);
  Among among = store_keys(s, a, at, keys, limit);
  const Last last = find_last_listed(s, a, at, keys, need, limit, among);
  emit_chosen(s.choice, at, among, last, [=](int n, int place) { indices[n] = at.first_page * PAGE + place; });
  if (at.rank > 0) return;
  for (int i = need + at.tid; i < count; i += THREADS) indices[i] = at.candidates + i - need;
  write_absent(a, at, count);
  if (at.tid == 0) a.block_counts[at.pair] = count;
}
